"""The supervisor's side of a session, with a host that is a mock."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.result import Isolation, Usage
from headrace_sandbox.runtimes.shared.sessions import HostedSession, SessionBackend, _parse_cell_end


async def test_a_session_that_is_closed_while_its_host_starts_leaves_no_host() -> None:
    host, goes_on = Mock(end=AsyncMock()), asyncio.Event()

    async def start() -> Mock:
        await goes_on.wait()
        return host

    isolation = Isolation(runtime="none", versions={}, active=[])
    session = HostedSession(SessionBackend(start, Usage, AsyncMock(), isolation, list, 1.0))
    starting = asyncio.ensure_future(session.start())
    await asyncio.sleep(0)
    await session.close()
    goes_on.set()
    with pytest.raises(SandboxFailure) as caught:
        await starting
    assert caught.value.kind == "closed"
    host.end.assert_awaited_once()


async def test_a_session_ends_even_if_its_close_is_cancelled() -> None:
    goes_on, ended = asyncio.Event(), asyncio.Event()

    async def end() -> None:
        await goes_on.wait()
        ended.set()

    isolation = Isolation(runtime="none", versions={}, active=[])
    session = HostedSession(
        SessionBackend(AsyncMock(return_value=Mock(end=end)), Usage, AsyncMock(), isolation, list, 1.0)
    )
    await session.start()
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    asyncio.get_running_loop().call_later(0.05, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ended.is_set()


def test_an_unreadable_frame_of_a_host_is_our_failure() -> None:
    for said in (b"", b"[]", b'{"status": Infinity, "lost": "", "disk_full": false}', b"[" * 100_000):
        with pytest.raises(SandboxFailure) as caught:
            _parse_cell_end(said)
        assert caught.value.kind == "bad-frame"

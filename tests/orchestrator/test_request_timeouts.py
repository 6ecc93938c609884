"""Timeouts of the orchestrator for what clients say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace_orchestrator.server import Protocol
from tests.orchestrator.serving import Api

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LEASE = b'{"worker":"w","slots":1,"free":1,"wait_s":0.5}'
HEAD = (
    b"POST /v1/worker/lease HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@contextlib.asynccontextmanager
async def connected(api: Api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = api.session._base_url
    assert url is not None
    assert url.host is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(20):
        yield reader, writer
    writer.close()


async def is_closed(api: Api, before: bytes, said: bytes) -> None:
    """A connection on which a client says this, after a request that was answered if there was one."""
    async with connected(api) as (reader, writer):
        if before:
            writer.write(before)
            await reader.readuntil(b"}")
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("before", "said"),
    [(b"", b""), (b"", b"\r\n"), (HEALTH, b"\r\n")],
    ids=["silent", "an empty line", "an empty line after a request"],
)
async def test_a_connection_on_which_no_request_begins_is_closed(
    api: Api, monkeypatch: pytest.MonkeyPatch, before: bytes, said: bytes
):
    monkeypatch.setattr(Protocol, "idle_timeout_s", 0.05)
    await is_closed(api, before, said)


@pytest.mark.parametrize("said", [b"G", HEAD[:40], HEAD % 100 + LEASE], ids=["a letter", "half a head", "half a body"])
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["at first", "after another"])
async def test_a_connection_whose_request_is_not_here_whole_in_time_is_closed(
    api: Api, monkeypatch: pytest.MonkeyPatch, before: bytes, said: bytes
):
    monkeypatch.setattr(Protocol, "request_timeout_s", 0.05)
    await is_closed(api, before, said)


async def test_a_request_that_is_here_whole_is_answered_however_long_that_takes(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Protocol, "idle_timeout_s", 0.3)
    monkeypatch.setattr(Protocol, "request_timeout_s", 0.3)
    async with connected(api) as (reader, writer):
        writer.write(HEAD % len(LEASE) + LEASE[:-1])
        await api.ask("GET", "/healthz")
        writer.write(LEASE[-1:])
        assert b" 200 " in await reader.readline()

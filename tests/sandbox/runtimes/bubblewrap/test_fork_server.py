"""The fork server of Python programs: its loss, its slots and its limits."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import descendants, pids_with_mark
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_sandbox.runtimes.bubblewrap import fork_server
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer

pytestmark = pytest.mark.component("bubblewrap")


async def test_a_fork_server_that_was_killed_is_replaced(forked: ForkServer) -> None:
    await forked.run(PythonProgram(code=""), Limits())
    assert forked._server is not None
    os.kill(forked._server._process.pid, signal.SIGKILL)
    forked._server._process.wait()
    assert (await forked.run(PythonProgram(code="print('again')"), Limits())).stdout.text == "again\n"


async def test_a_fork_server_that_dies_under_a_program_is_our_failure(forked: ForkServer) -> None:
    mark = secrets.token_hex(8)
    code = f"import os\nos.execv('/bin/sleep', ['{mark}', '300'])"
    running = asyncio.ensure_future(forked.run(PythonProgram(code=code), Limits(wall_s=30)))
    async with asyncio.timeout(20):
        while not pids_with_mark(mark):
            await asyncio.sleep(0.01)
    assert forked._server is not None
    os.kill(forked._server._process.pid, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)


async def test_a_preloaded_module_that_does_not_exist_is_named() -> None:
    server = ForkServer(preload=("no_such_module",))
    with pytest.raises(SandboxFailure, match="no_such_module"):
        await server.run(PythonProgram(code=""), Limits())
    await server.close()


async def test_idle_slots_are_ended(forked: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "IDLE_S", 0.1)
    await asyncio.gather(*(forked.run(PythonProgram(code=""), Limits()) for _ in range(3)))
    async with asyncio.timeout(20):
        while forked._free or forked._ending:
            await asyncio.sleep(0.05)
    assert forked._server is not None
    assert len(descendants(forked._server._process.pid)) == 2  # bubblewrap's process 1, and the interpreter
    assert (await forked.run(PythonProgram(code="print(1)"), Limits())).stdout.text == "1\n"


async def test_a_slot_that_was_killed_is_not_used_again(forked: ForkServer) -> None:
    await forked.run(PythonProgram(code=""), Limits())
    [slot] = forked._free
    os.kill(slot._pid, signal.SIGKILL)
    select.select([slot._pidfd], [], [], 10)
    assert (await forked.run(PythonProgram(code="print('again')"), Limits())).stdout.text == "again\n"
    assert list(forked._free) != [slot]


async def test_a_fork_with_too_many_files_ran_into_its_disk(forked: ForkServer) -> None:
    code = "for number in range(20_000):\n    open(f'{number}', 'w').close()"
    result = await forked.run(PythonProgram(code=code), Limits(wall_s=20))
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")


async def test_a_request_that_is_too_large_is_refused(forked: ForkServer) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await forked.run(PythonProgram(code="#" * fork_server.MOST_BYTES), Limits())
    assert caught.value.kind == "request-too-large"

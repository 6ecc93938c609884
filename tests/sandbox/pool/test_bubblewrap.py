"""The pool over real sandboxes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.host.supervisor import sandbox_holders, this_supervisor
from headrace_sandbox.pool.leased_sandbox import LeasedSandbox
from headrace_sandbox.pool.messages import PoolSettings
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap import runtime as bubblewrap
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=20.0)
TEMPLATE = Template(files={"given": b"1"})


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """A pool of one sandbox."""
    pool = Pool(BubblewrapRuntime(), PoolSettings(sandboxes=1))
    yield pool
    await pool.close()


async def shell(leased: LeasedSandbox, script: str) -> str:
    return (await leased.run(SandboxCommand(arguments=["sh", "-c", script]), LIMITS)).stdout.text


async def test_a_real_sandbox_is_as_new_when_it_is_leased_again(pool: Pool) -> None:
    mark = secrets.token_hex(8)
    first = await pool.lease(TEMPLATE, 60)
    session = await first.session("bash")
    await session.run(f"echo mine > mine; rm given; (exec -a {mark} sleep 300) & export X=1", LIMITS)
    async with asyncio.timeout(30):
        while not pids_with_mark(mark):
            await asyncio.sleep(0.01)
    await first.close()
    second = await pool.lease(TEMPLATE, 60)
    assert await shell(second, "ls; cat given; echo [$X]") == "given\n1[]\n"
    assert not pids_with_mark(mark)
    with pytest.raises(SandboxFailure, match="over"):
        await session.run("echo still there", LIMITS)
    await second.close()
    assert pool.counts().sandboxes["idle"] == 1 or pool.counts().sandboxes["cleaning"] == 1


async def test_a_real_sandbox_that_was_ended_from_outside_is_our_failure_and_not_leased_again(pool: Pool) -> None:
    leased = await pool.lease(TEMPLATE, 60)
    await shell(leased, "true")
    for pid, holder in sandbox_holders():
        if holder == this_supervisor():
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await shell(leased, "echo ok")
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    await leased.close()
    again = await pool.lease(TEMPLATE, 60)
    assert await shell(again, "echo ok") == "ok\n"
    await again.close()


async def test_interpreters_of_former_domains_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "MOST_SERVERS", 2)
    runtime = BubblewrapRuntime()
    for number in range(4):
        program = PythonProgram(code="print(1)", domain=f"run {number}", preload=())
        assert (await runtime.run_code(program, LIMITS)).stdout.text == "1\n"
    assert [domain for _, domain in runtime._servers] == ["run 2", "run 3"]
    await runtime.close()
    async with asyncio.timeout(10):  # its other processes end a moment after the awaited one
        while any(holder == this_supervisor() for _, holder in sandbox_holders()):
            await asyncio.sleep(0.01)

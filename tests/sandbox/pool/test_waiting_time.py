"""G16: waiting for a sandbox and making one do not count as the command's time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.environment import Step
from headrace.errors import SandboxFailure
from headrace_sandbox.client import client_of
from headrace_sandbox.pool.messages import PoolSettings
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_workers.environment_context import EnvironmentContext
from headrace_workers.sandboxes import WorkerSandbox
from tests.sandbox.service.serving import service
from tests.workers.fakes import Script, play, say

pytestmark = pytest.mark.component("bubblewrap")

LONG = SandboxCommand(arguments=["sleep", "6"])
SHORT = SandboxCommand(arguments=["bash", "-c", "kill -9 $$"])
LIMITS = Limits(wall_s=20.0)
TWO_SECONDS = Limits(wall_s=2.0)


class Slow(BubblewrapRuntime):
    """Making a sandbox takes 4 s more."""

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        await asyncio.sleep(4)
        result = await super().run(command, limits)
        return ExecResult(**{**_fields(result), "start_s": result.start_s + 4})

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        await asyncio.sleep(4)
        return await super().open(template, ttl_s)


def _fields(result: ExecResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


def is_killed_by_itself(result: ExecResult) -> bool:
    return (result.signal, result.fault, result.limit, result.lost) == (9, "program", None, None)


async def in_a_lease(
    pool: Pool, command: SandboxCommand, limits: Limits, wait_s: float
) -> tuple[ExecResult, float, float]:
    """The result of a command in a leased sandbox, the waiting time, and the time to make the sandbox."""
    leased = await pool.lease(Template(), 60, wait_s=wait_s)
    try:
        return await leased.run(command, limits), leased.queue_s, leased.start_s
    finally:
        await leased.close()


async def alone(pool: Pool, command: SandboxCommand, limits: Limits, wait_s: float) -> tuple[ExecResult, float, float]:
    """The same for a command in a sandbox of its own."""
    result = await pool.run(command, limits, wait_s=wait_s)
    return result, result.queue_s, result.start_s


async def waits_for_another(way: Any) -> None:
    pool = Pool(BubblewrapRuntime(), PoolSettings(running=1, sandboxes=1))
    first = asyncio.ensure_future(way(pool, LONG, LIMITS, 30.0))
    await asyncio.sleep(0.1)
    second = asyncio.ensure_future(way(pool, SHORT, TWO_SECONDS, 30.0))
    with pytest.raises(SandboxFailure, match="no sandbox within 3 s") as caught:
        await way(pool, SHORT, TWO_SECONDS, 3.0)
    assert (caught.value.layer, caught.value.retryable) == ("sandbox", True)
    result, queue_s, start_s = await second
    assert is_killed_by_itself(result)
    assert queue_s > max(4.5, start_s)
    assert result.wall_s < TWO_SECONDS.wall_s
    assert (await first)[0].exit_code == 0
    await pool.close()


async def waits_for_its_start(way: Any) -> None:
    pool = Pool(Slow(), PoolSettings(running=1, sandboxes=1))
    result, queue_s, start_s = await way(pool, SHORT, TWO_SECONDS, 30.0)
    assert is_killed_by_itself(result)
    assert start_s >= max(4, queue_s)
    assert result.wall_s < TWO_SECONDS.wall_s
    await pool.close()


async def test_the_waiting_time_and_the_programs_time_are_reported_separately() -> None:
    await asyncio.gather(waits_for_another(in_a_lease), waits_for_another(alone))


async def test_the_time_to_make_a_sandbox_and_the_programs_time_are_reported_separately() -> None:
    await asyncio.gather(waits_for_its_start(in_a_lease), waits_for_its_start(alone))


class RunsShort:
    """An environment whose one step runs a command that is killed at once."""

    def __init__(self) -> None:
        self.environment_context: EnvironmentContext | None = None

    def reset(self, seed: int | None = None) -> Any:
        return "go", {}

    async def step(self, action: str) -> Step:
        assert self.environment_context is not None
        result = await self.environment_context.sandbox.run(SHORT, TWO_SECONDS)
        return Step(f"signal {result.signal}", 1.0, True, False, {})


async def test_waiting_for_a_sandbox_is_not_working_time_of_an_episode(tmp_path: Path) -> None:
    async with service(BubblewrapRuntime(), tmp_path / "s", pool={"running": 1}) as address:
        client = client_of(address, owner="another run")
        first = asyncio.ensure_future(client.run(LONG, LIMITS))
        await asyncio.sleep(0.1)
        worker = WorkerSandbox(address)
        limits = {"working_time_s": 3.0, "environment_timeout_s": 3.0}
        record = await play(Script(say("x")), RunsShort, clock=time.monotonic, sandbox=worker, limits=limits)
        assert (record.status, record.stop_reason) == ("finished", "terminated")
        assert record.messages[-1].content == "signal 9"
        assert record.timing.environment_s < limits["working_time_s"]
        assert record.timing.waiting_s > 4.5
        assert (await first).exit_code == 0
        await client.close()
        await worker.close()

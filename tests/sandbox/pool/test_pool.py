"""The pool over a runtime in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.pool.messages import PoolSettings, WarmBounds
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from tests.sandbox.memory_runtime import MemoryRuntime

LIMITS = Limits(memory_bytes=1 << 20)
TEMPLATE = Template(files={"a": b"1"}, limits=LIMITS)


@pytest.fixture
def runtime() -> MemoryRuntime:
    return MemoryRuntime()


@pytest.fixture
async def make(runtime: MemoryRuntime) -> AsyncIterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make_pool(*warm: tuple[Template, WarmBounds], **bounds: Any) -> Pool:
        pools.append(Pool(runtime, PoolSettings(**bounds), warm))
        return pools[-1]

    yield make_pool
    for pool in pools:
        await pool.close()
        assert pool.counts().memory_bytes == 0
    assert runtime.running == 0
    assert runtime.living == set()


def code(words: str) -> PythonProgram:
    return PythonProgram(code=words)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


async def test_no_more_executions_run_at_a_time_than_allowed_and_all_run_in_the_end(
    make: Any, runtime: MemoryRuntime
) -> None:
    pool = make(running=3)
    results = await asyncio.gather(*(pool.run_code(code("sleep 0.01"), LIMITS, owner=f"{n % 4}") for n in range(20)))
    assert runtime.most_running == 3
    assert results[0].queue_s < max(result.queue_s for result in results)
    assert max(result.queue_s for result in results) > 0.05


async def test_a_sandbox_is_reset_before_it_is_leased_again(make: Any, runtime: MemoryRuntime) -> None:
    pool = make(sandboxes=1)
    first = await pool.lease(TEMPLATE, 60)
    await first.write("b", b"mine")
    await first.close()
    second = await pool.lease(TEMPLATE, 60)
    assert [file.path for file in await second.list()] == ["a"]
    assert len(runtime.living) == 1
    await second.close()


@pytest.mark.parametrize("words", ["lost", "fail"])
async def test_a_sandbox_in_which_something_suspicious_happened_is_not_reset_but_closed(
    make: Any, runtime: MemoryRuntime, words: str
) -> None:
    pool = make(sandboxes=1)
    first = await pool.lease(TEMPLATE, 60)
    before = set(runtime.living)
    with contextlib.suppress(SandboxFailure):
        assert (await first.run(SandboxCommand(arguments=[words]), LIMITS)).lost
    await first.close()
    second = await pool.lease(TEMPLATE, 60)
    assert not before & runtime.living
    await second.close()


async def test_a_harmless_failure_does_not_make_a_sandbox_suspicious(make: Any, runtime: MemoryRuntime) -> None:
    pool = make(sandboxes=1)
    first = await pool.lease(TEMPLATE, 60)
    before = set(runtime.living)
    with pytest.raises(SandboxFailure, match="There is no"):
        await first.read("nothing", 10)
    await first.close()
    await (await pool.lease(TEMPLATE, 60)).close()
    assert runtime.living == before


async def test_a_sandbox_that_cannot_be_reset_is_closed_and_another_is_made(make: Any, runtime: MemoryRuntime) -> None:
    runtime.reset_fails = lambda: True
    pool = make(sandboxes=1)
    await (await pool.lease(TEMPLATE, 60)).close()
    await (await pool.lease(TEMPLATE, 60)).close()
    await until(lambda: not runtime.living)


async def test_a_request_that_is_cancelled_while_it_waits_keeps_nothing(make: Any, runtime: MemoryRuntime) -> None:
    pool = make(running=1, sandboxes=1)
    lease = await pool.lease(TEMPLATE, 60)
    first = asyncio.ensure_future(pool.run_code(code("sleep 60"), LIMITS))
    waiting = [
        asyncio.ensure_future(pool.run_code(code("x"), LIMITS)),
        asyncio.ensure_future(pool.lease(TEMPLATE, 60)),
    ]
    await until(lambda: pool.counts().waiting == 2)
    for task in waiting:
        task.cancel()
    await until(lambda: pool.counts().waiting == 0)
    first.cancel()
    await until(lambda: pool.counts().running == 0)
    await lease.close()
    assert runtime.ran == ["sleep 60"]


async def test_a_request_that_is_cancelled_just_as_it_is_served_keeps_nothing(
    make: Any, runtime: MemoryRuntime
) -> None:
    pool = make(running=1, sandboxes=1)
    first = asyncio.ensure_future(pool.run_code(code("sleep 60"), LIMITS))
    await until(lambda: runtime.running)
    second = asyncio.ensure_future(pool.run_code(code("second"), LIMITS))
    await until(lambda: pool.counts().waiting)
    first.cancel()
    await asyncio.sleep(0)  # the first ends in this turn, and the second is served
    second.cancel()
    await until(lambda: pool.counts().running == 0)
    lease = await pool.lease(TEMPLATE, 60)
    third = asyncio.ensure_future(pool.lease(TEMPLATE, 60))
    await until(lambda: pool.counts().waiting)
    await lease.close()
    third.cancel()
    await until(lambda: pool.counts().sandboxes["idle"] == 1)
    assert pool.counts().leases == 0


async def test_after_the_end_of_the_lease_a_running_call_ends_with_a_failure_of_ours(
    make: Any, runtime: MemoryRuntime
) -> None:
    pool = make()
    lease = await pool.lease(TEMPLATE, 0.05)
    with pytest.raises(SandboxFailure) as caught:
        await lease.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("lease-over", True)
    with pytest.raises(SandboxFailure, match="over"):
        await lease.read("a", 10)
    with pytest.raises(SandboxFailure, match="over"):
        lease.renew(10)
    await until(lambda: not runtime.living)
    await lease.close()


async def test_a_renewed_lease_goes_on(make: Any) -> None:
    pool = make()
    lease = await pool.lease(TEMPLATE, 0.05)
    assert lease.renew(60) == pytest.approx(60)
    assert (await lease.run(SandboxCommand(arguments=["sleep", "0.1"]), LIMITS)).exit_code == 0
    await lease.close()


async def test_closing_a_leased_sandbox_ends_its_running_calls(make: Any) -> None:
    pool = make()
    lease = await pool.lease(TEMPLATE, 60)
    running = asyncio.ensure_future(lease.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS))
    await asyncio.sleep(0.01)
    await lease.close()
    with pytest.raises(SandboxFailure, match="over"):
        await running


async def test_a_cancelled_close_still_gives_the_sandbox_back(make: Any, runtime: MemoryRuntime) -> None:
    pool = make()
    lease = await pool.lease(TEMPLATE, 60)
    running = asyncio.ensure_future(lease.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS))
    await asyncio.sleep(0.01)
    giving_back = asyncio.ensure_future(lease.close())
    await asyncio.sleep(0)
    giving_back.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving_back
    assert pool.counts().leases == 0
    await until(lambda: not runtime.living)
    with pytest.raises(SandboxFailure, match="over"):
        await running


async def test_warm_sandboxes_are_ready_before_the_first_request(make: Any, runtime: MemoryRuntime) -> None:
    runtime.make_s = 0.2
    pool = make((TEMPLATE, WarmBounds(least=2, most=2)))
    await pool.start()
    await until(lambda: pool.counts().sandboxes["idle"] == 2)
    lease = await pool.lease(TEMPLATE, 60)
    assert (lease.queue_s, lease.start_s) == (pytest.approx(0, abs=0.1), 0.0)
    await lease.close()


async def test_making_is_retried_until_the_deadline(make: Any, runtime: MemoryRuntime) -> None:
    fails = iter([True, True, False])
    runtime.open_fails = lambda: next(fails)
    pool = make()
    await (await pool.lease(TEMPLATE, 60)).close()
    runtime.open_fails = lambda: True
    with pytest.raises(SandboxFailure, match=r"no sandbox within 0.1 s; .*There is no room") as caught:
        await pool.lease(Template(), 60, wait_s=0.1)
    assert (caught.value.kind, caught.value.retryable) == ("no-sandbox-in-time", True)


async def test_a_sandbox_that_cannot_be_closed_is_kept_out_of_use(make: Any, runtime: MemoryRuntime) -> None:
    runtime.close_fails = lambda: True
    pool = Pool(runtime, PoolSettings(sandboxes=1, reuse=False))
    await (await pool.lease(TEMPLATE, 60)).close()
    await until(lambda: pool.counts().sandboxes["stuck"] == 1)
    with pytest.raises(SandboxFailure, match="no sandbox within"):
        await pool.lease(TEMPLATE, 60, wait_s=0.05)
    await pool.close()
    runtime.living.clear()


async def test_a_draining_pool_refuses_new_requests(make: Any, runtime: MemoryRuntime) -> None:
    pool = make(running=1)
    first = asyncio.ensure_future(pool.run_code(code("sleep 0.05"), LIMITS))
    second = asyncio.ensure_future(pool.run_code(code("second"), LIMITS))
    await until(lambda: pool.counts().waiting)
    pool.drain()
    for asked in (second, pool.run_code(code("third"), LIMITS)):
        with pytest.raises(SandboxFailure) as caught:
            await asked
        assert (caught.value.kind, caught.value.retryable) == ("draining", True)
    assert (await first).exit_code == 0


async def test_a_cancelled_execution_is_awaited_before_the_runtime_is_closed() -> None:
    ended = []

    class SlowToEnd(MemoryRuntime):
        async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ended.append("execution")
            raise AssertionError

        async def close(self) -> None:
            ended.append("runtime")

    pool = Pool(SlowToEnd())
    running = asyncio.create_task(pool.run_code(code(""), LIMITS))
    await until(lambda: pool.counts().running)
    running.cancel()
    await asyncio.sleep(0)
    await pool.close()
    assert ended == ["execution", "runtime"]

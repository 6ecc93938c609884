"""The time limit of a bounded call: only its own work counts, however busy the machine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace.errors import InfrastructureFailure
from headrace_workers.bounded_calls import BoundedCalls, LimitExceeded
from headrace_workers.bounded_calls.server import SHORT_CALL_S
from tests.workers.bounded_calls.test_grading_limits import context_of, grader_pid
from tests.workers.busy_machine import busy_machine

COMPUTE = "tests.workers.bounded_calls.work:compute"
MEMORY = 1 << 30


@pytest.fixture
async def calls() -> AsyncIterator[BoundedCalls]:
    calls = BoundedCalls()
    yield calls
    await calls.close()


@pytest.fixture
def busy() -> Iterator[None]:
    with busy_machine():
        yield


async def test_starvation_by_others_does_not_count(calls: BoundedCalls, busy: None) -> None:
    assert await calls.call(COMPUTE, 0.3, time_s=0.6, memory_bytes=MEMORY) == 0.3


async def test_a_call_that_never_ends_is_exhausted_also_on_a_busy_machine(calls: BoundedCalls, busy: None) -> None:
    for function, argument in ((COMPUTE, 1e9), ("time:sleep", 1e6)):
        with pytest.raises(LimitExceeded) as caught:
            await calls.call(function, argument, time_s=0.3, memory_bytes=MEMORY)
        assert caught.value.limit == "time"


async def test_the_verdict_does_not_depend_on_how_many_calls_run(calls: BoundedCalls) -> None:
    work_s = 1.5 * SHORT_CALL_S  # each becomes a long call, with the lowest priority
    asked = [calls.call(COMPUTE, work_s, time_s=2.5 * work_s, memory_bytes=MEMORY) for _ in range(16)]
    assert await asyncio.gather(*asked) == [work_s] * 16


async def test_the_import_of_a_cold_module_and_the_start_of_a_process_do_not_count(calls: BoundedCalls) -> None:
    module = "tests.workers.bounded_calls.slow_import"
    assert await calls.call(f"{module}:answer", time_s=0.2, memory_bytes=MEMORY) == 42


async def test_a_bound_on_the_whole_is_a_retryable_failure_of_ours_and_ends_only_its_call() -> None:
    calls = BoundedCalls(whole_s=2.0, whole_factor=0.0)
    try:
        await calls.call("math:gcd", 12, 18, time_s=30.0, memory_bytes=MEMORY)
        server = calls._server
        other = asyncio.create_task(calls.call("time:sleep", 1.0, time_s=30.0, memory_bytes=MEMORY))
        with pytest.raises(InfrastructureFailure) as caught:
            await calls.call("time:sleep", 60.0, time_s=30.0, memory_bytes=MEMORY)
        assert (caught.value.kind, caught.value.retryable) == ("bounded-call-starved", True)
        assert await other is None
        assert calls._server is server
        assert await calls.call("math:gcd", 12, 18, time_s=30.0, memory_bytes=MEMORY) == 6
    finally:
        await calls.close()


async def test_a_call_whose_caller_gave_up_is_killed(calls: BoundedCalls) -> None:
    asked = asyncio.create_task(calls.call("time:sleep", 60.0, time_s=90.0, memory_bytes=MEMORY))
    child = await grader_pid(calls)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    async with asyncio.timeout(10):
        while Path(f"/proc/{child}").exists():
            await asyncio.sleep(0.02)
    assert await calls.call("math:gcd", 12, 18, time_s=5, memory_bytes=MEMORY) == 6


async def test_only_the_work_of_a_call_counts_for_the_deadline_of_the_step_and_as_working_time(
    calls: BoundedCalls, busy: None
) -> None:
    context = context_of(calls)
    begun_at = time.monotonic()
    async with asyncio.timeout(0.5) as deadline:
        context.begin(deadline)
        await context.bounded(COMPUTE, 0.2, time_s=5.0, memory_bytes=MEMORY)
        left_s = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
        passed_s, waited_s = time.monotonic() - begun_at, context.take_waited_s()
    assert 0.0 < left_s <= 0.35
    assert 0.15 <= passed_s - waited_s <= 0.45

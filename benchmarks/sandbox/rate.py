"""Executions per second, several at a time, and the processor time of one."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.sandbox.ways import LIMITS, PROGRAM, bare
from benchmarks.table import Row
from headrace_sandbox.host.supervisor import this_supervisor
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

EXECUTIONS, AT_A_TIME, ROUNDS = 200, 4, 5

LEAST_A_SECOND_AND_CORE = 150.0
"""The goal: 300 on two cores."""


async def rows() -> list[Row]:
    """Measure alternating rounds, and report the best of each: other work on the machine only slows them."""
    runtime = BubblewrapRuntime()

    async def code() -> None:
        await runtime.run_code(PROGRAM, LIMITS)

    await _rate(code)  # makes the warm parts
    rates: list[tuple[float, float]] = []
    costs: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        before = _cpu_s()
        one = await _rate(code)
        between = _cpu_s()
        other = await _rate(bare)
        costs.append((between - before, _cpu_s() - between))
        rates.append((one, other))
    await runtime.close()
    ours, theirs = (max(side) for side in zip(*rates, strict=True))
    cost, bare_cost = (1e3 * min(side) / EXECUTIONS for side in zip(*costs, strict=True))
    cores = len(os.sched_getaffinity(0))
    goal, work = LEAST_A_SECOND_AND_CORE * cores, f"isolated executions, {AT_A_TIME} at a time"
    return [
        Row(work, ours, "1/s", f"the goal on {cores} cores", goal, 1, "higher"),
        Row(work, ours, "1/s", "bare interpreters", theirs, 1, "higher"),
        Row("processor time of one, supervisor included", cost, "ms", "a bare interpreter", bare_cost, 1, "lower"),
    ]


async def _rate(call: Callable[[], Awaitable[None]]) -> float:
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one() -> None:
        async with turns:
            await call()

    started_at = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(EXECUTIONS)))
    return EXECUTIONS / (time.perf_counter() - started_at)


def _cpu_s() -> float:
    """Processor time of this process, its ended children and its control groups."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    here = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    counters = Path("/sys/fs/cgroup/cpuacct/headrace").glob(f"{this_supervisor()}-*/cpuacct.usage")
    return here + sum(int(counter.read_text()) / 1e9 for counter in counters)

"""Random hostile programs on the default runtime: each ends in time with a result, and leaves nothing.

``HEADRACE_PROGRAMS`` is their number, by default a few hundred. ``HEADRACE_SEED`` is the first seed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter

import msgspec
import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import Traces, traces
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from tests.sandbox.runtimes.bubblewrap.program_grammar import program

PROGRAMS = int(os.environ.get("HEADRACE_PROGRAMS", "300"))

FIRST_SEED = int(os.environ.get("HEADRACE_SEED", "1"))

AT_A_TIME = 16

FRESH_EVERY = 10
"""One of this many programs runs in a sandbox of its own, the others in forks."""

LIMITS = Limits(wall_s=1.0, memory_bytes=64 << 20, pids=24, output_bytes=1 << 20, kept_bytes=1000)

HANG_S = 60.0
"""Deadline far beyond the limit of time, which only a program that hangs exceeds, on a busy machine too."""

PATIENT = msgspec.structs.replace(LIMITS, wall_s=30.0)

COME_TO = {4: "limit of pids", 163: "limit of memory"}
"""Seeds whose programs run into these limits, unless their time ends before on a busy machine."""


async def outcome(runtime: Runtime, seed: int, limits: Limits = LIMITS) -> str:
    code = program(seed)
    try:
        async with asyncio.timeout(HANG_S):
            if seed % FRESH_EVERY:
                return describe_end(await runtime.run_code(PythonProgram(code=code), limits))
            return describe_end(await runtime.run(SandboxCommand(arguments=["python3", "-I", "-c", code]), limits))
    except TimeoutError:
        return f"hang: seed {seed}"
    except SandboxFailure as failure:
        return f"failure: seed {seed}: {failure}"


def describe_end(result: ExecResult) -> str:
    if result.fault == "limit":
        return f"limit of {result.limit}"
    if result.lost is not None:
        return "lost"
    return "signal" if result.signal is not None else f"exit {min(result.exit_code or 0, 1)}"


async def settled_traces(before: Traces) -> Traces:
    """The leftovers once they are no more than before, or after some seconds."""
    until = time.monotonic() + 10
    while (after := traces()) != before and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return after


@pytest.mark.component("bubblewrap")
@pytest.mark.component("cgroups")
@pytest.mark.timeout(60 + PROGRAMS)
async def test_random_programs_end_in_time_and_leave_nothing() -> None:
    await BubblewrapRuntime().close()  # this process keeps the lock on its range of user ids
    gc.collect()  # what other tests left to it
    nothing = traces()
    runtime = BubblewrapRuntime()
    quiet = PythonProgram(code="import time\ntime.sleep(0.5)")
    await asyncio.gather(*(runtime.run_code(quiet, LIMITS) for _ in range(AT_A_TIME)))
    await asyncio.gather(*(runtime.run(SandboxCommand(arguments=["sleep", "0.5"]), LIMITS) for _ in range(AT_A_TIME)))
    warm = traces()
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int) -> str:
        async with turns:
            return await outcome(runtime, seed)

    begun_at = time.monotonic()
    outcomes = Counter(await asyncio.gather(*(one(FIRST_SEED + number) for number in range(PROGRAMS))))
    print(f"{PROGRAMS} programs in {time.monotonic() - begun_at:.0f} s: {dict(outcomes.most_common(12))}")  # noqa: T201
    assert not [what for what in outcomes if what.startswith(("hang", "failure"))]
    assert await settled_traces(warm) == warm
    assert {seed: await outcome(runtime, seed, PATIENT) for seed in COME_TO} == COME_TO
    assert (await runtime.run_code(PythonProgram(code="print('fine')"), LIMITS)).stdout.text == "fine\n"
    await runtime.close()
    assert await settled_traces(nothing) == nothing
    if PROGRAMS >= 300:
        assert {"exit 0", "exit 1", "signal", "limit of time"} <= set(outcomes)


def test_a_seed_gives_the_same_program() -> None:
    assert program(7) == program(7)
    assert program(7) != program(8)
    for seed in range(200):
        compile(program(seed), "main.py", "exec")

"""Traces of executions, and the memory of an idle warm sandbox."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from benchmarks.sandbox.ways import COMMAND, LIMITS, PROGRAM
from benchmarks.table import Row
from headrace_sandbox.conformance.leftovers import Traces, descendants, traces
from headrace_sandbox.runtimes.bubblewrap.fork_server import IDLE_S
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

EXECUTIONS, FRESH_EVERY, AT_A_TIME = 1000, 10, 4

MOST_IDLE_MB = 10.0


async def rows() -> list[Row]:
    """Count traces after a thousand executions, one in ten in a fresh sandbox; measure an idle warm sandbox."""
    await BubblewrapRuntime().close()  # this process keeps the lock on its range of user ids
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # only this process's temporary files are there
        try:
            return await _rows()
        finally:
            tempfile.tempdir = None


async def _rows() -> list[Row]:
    before = _count_traces()
    runtime = BubblewrapRuntime()
    await runtime.run_code(PROGRAM, LIMITS)
    await asyncio.sleep(2 * IDLE_S + 0.5)
    idle_mb = sum(map(_pss_kib, descendants(os.getpid()))) / 1024
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        async with turns:
            if number % FRESH_EVERY:
                await runtime.run_code(PROGRAM, LIMITS)
            else:
                await runtime.run(COMMAND, LIMITS)

    await asyncio.gather(*(one(number) for number in range(EXECUTIONS)))
    await runtime.close()
    remaining = sum(after - earlier for after, earlier in zip(_count_traces(), before, strict=True))
    label = f"left by {EXECUTIONS:,} executions: processes, mounts, groups, files, descriptors"
    return [
        Row(label, remaining, "", "one", 1.0, 0.0, "lower"),
        Row(
            f"a warm Python sandbox, idle for {2 * IDLE_S:g} s (PSS)",
            idle_mb,
            "MB",
            "the goal",
            MOST_IDLE_MB,
            1.0,
            "lower",
        ),
    ]


def _count_traces() -> tuple[int, ...]:
    current: Traces = traces()
    files = len(list(Path(tempfile.gettempdir()).iterdir()))
    return current.children, current.mounts, current.groups, current.descriptors, files


def _pss_kib(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))

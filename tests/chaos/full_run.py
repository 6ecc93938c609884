"""The full run, ``make chaos``: all parts, two lanes concurrently, with the result and duration of each part.

* Parts of a lane run one after another; lanes run concurrently, because they wait more than they compute.
* Parts that use the whole machine and have time limits run alone, after the lanes.
* All parts run, even if others fail. The output of each is shown in one piece when it ends.
* Ends with status 1 if any part failed. No part outlives it: SIGINT and SIGTERM end all parts gracefully.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from headrace.common.timeouts import timeout
from tests.e2e.processes import ROOT

END_S = 30.0
"""Seconds for an interrupted part to clean up."""


@dataclass(frozen=True)
class Part:
    """One part: this Python with ``arguments``, and additions to its environment."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


class PartResult(NamedTuple):
    """The result of a part."""

    name: str
    status: int
    took_s: float

    @property
    def passed(self) -> bool:
        return self.status == 0


def _tests(name: str, *arguments: str, **environment: str) -> Part:
    return Part(name, ("-m", "pytest", "-q", "--timeout=600", *arguments), environment)


KILLS = Part("kills and power cuts", ("-m", "tests.chaos"))
HISTORIES = _tests("1,000 histories of the buffer", "tests/chaos/test_model.py", CHAOS_EXAMPLES="1000")
ASSETS = _tests(
    "500 deletions of assets (G07)",
    "tests/orchestrator/service/test_asset_collection_races.py",
    HEADRACE_G07_ROUNDS="500",
)
READERS = _tests(
    "10 stalled readers (G08)", "tests/orchestrator/service/test_projection_readers.py", HEADRACE_G08_ROUNDS="10"
)
FOLDERS = _tests(
    "1,000 hostile folders", "tests/orchestrator/buffer/test_hostile_folders.py", HEADRACE_HOSTILE_FOLDERS="1000"
)
SANDBOXES = _tests("50 kills of sandbox services", "tests/sandbox/service/test_kills.py", HEADRACE_SANDBOX_KILLS="50")
CLIENTS = _tests(
    "idle connections and endless headers", "tests/chaos/test_hostile_clients.py", CHAOS_HOSTILE_ROUNDS="20"
)
WORKERS = _tests("20 dead workers", "tests/chaos/test_dead_workers.py", CHAOS_DEAD_WORKERS="20")
NAMES = _tests("kills of workers that keep their names", "tests/chaos/test_kept_names.py", CHAOS_KEPT_NAMES="24")
PROGRAMS = _tests(
    "10,000 hostile programs",
    "-s",
    "tests/sandbox/runtimes/bubblewrap/test_random_programs.py",
    HEADRACE_PROGRAMS="10000",
)

LANES = ((KILLS, SANDBOXES), (HISTORIES, ASSETS, READERS, FOLDERS))
ALONE = (CLIENTS, WORKERS, NAMES, PROGRAMS)


async def run(lanes: Sequence[Sequence[Part]], alone: Sequence[Part], console: Console) -> int:
    """Run all parts and show their results; returns the exit status."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(_run_in_order(lane, console)) for lane in lanes]
    results = [result for lane in running for result in lane.result()]
    results += await _run_in_order(alone, console)
    table = Table("part", "seconds", "result", title=f"all parts in {time.monotonic() - begun:.0f} s")
    for result in results:
        table.add_row(
            result.name, f"{result.took_s:.0f}", "passed" if result.passed else f"failed with {result.status}"
        )
    console.print(table)
    return 0 if all(result.passed for result in results) else 1


async def _run_in_order(parts: Sequence[Part], console: Console) -> list[PartResult]:
    return [await _run(part, console) for part in parts]


async def _run(part: Part, console: Console) -> PartResult:
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *part.arguments,
            cwd=ROOT,
            env={**os.environ, **part.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,  # standard error shows progress and is passed on at once
            start_new_session=True,  # only this process interrupts it
            preexec_fn=_restore_sigint,
        )
        try:
            result = PartResult(part.name, await process.wait(), time.monotonic() - begun)
        finally:
            await _end(process)
        output.seek(0)
        console.rule(f"{part.name}: {result.took_s:.0f} s")
        console.out(output.read().decode(errors="replace"), highlight=False)
    return result


def _restore_sigint() -> None:
    """Undo that SIGINT is ignored: a shell sets that for background processes, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt a part that still runs, and wait for its end."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        async with timeout(END_S):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        await process.wait()


async def main() -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(LANES, ALONE, Console())


if __name__ == "__main__":
    with suppress(asyncio.CancelledError):
        sys.exit(asyncio.run(main()))
    sys.exit(1)

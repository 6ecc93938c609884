"""The long form, ``make chaos``: all parts, two beside each other, and what came of each in how long.

* Parts of a lane follow each other; lanes run beside each other, for they wait more than they compute.
* What fills a machine and has limits of time runs alone, after the lanes.
* All parts run, whatever came of the others. Each one's output is shown in one piece when it ends.
* Ends with status 1 if any part failed. No part outlives it: SIGINT and SIGTERM end them all in order.
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
"""For a part that is interrupted to leave nothing behind."""


@dataclass(frozen=True)
class Part:
    """Something that is run: this Python with ``arguments``, and more in its environment."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


class Ended(NamedTuple):
    """What came of a part."""

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
SANDBOXES = _tests("50 kills of sandbox services", "tests/sandbox/service/test_kills.py", HEADRACE_SANDBOX_KILLS="50")
PROGRAMS = _tests(
    "10,000 hostile programs",
    "-s",
    "tests/sandbox/runtimes/bubblewrap/test_random_programs.py",
    HEADRACE_PROGRAMS="10000",
)

LANES = ((KILLS, SANDBOXES), (HISTORIES, ASSETS, READERS))
ALONE = (PROGRAMS,)


async def run(lanes: Sequence[Sequence[Part]], alone: Sequence[Part], console: Console) -> int:
    """Run all parts and show what came of them; gives the exit status."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(_follow(lane, console)) for lane in lanes]
    ended = [one for lane in running for one in lane.result()]
    ended += await _follow(alone, console)
    table = Table("part", "seconds", "ended", title=f"all of it in {time.monotonic() - begun:.0f} s")
    for one in ended:
        table.add_row(one.name, f"{one.took_s:.0f}", "passed" if one.passed else f"failed with {one.status}")
    console.print(table)
    return 0 if all(one.passed for one in ended) else 1


async def _follow(parts: Sequence[Part], console: Console) -> list[Ended]:
    return [await _run(part, console) for part in parts]


async def _run(part: Part, console: Console) -> Ended:
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *part.arguments,
            cwd=ROOT,
            env={**os.environ, **part.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,  # standard error is for how far it is, and is passed on at once
            start_new_session=True,  # it is this process that interrupts it, and nobody else
            preexec_fn=_can_be_interrupted,
        )
        try:
            ended = Ended(part.name, await process.wait(), time.monotonic() - begun)
        finally:
            await _end(process)
        output.seek(0)
        console.rule(f"{part.name}: {ended.took_s:.0f} s")
        console.out(output.read().decode(errors="replace"), highlight=False)
    return ended


def _can_be_interrupted() -> None:
    """A shell has what it runs in the background ignore SIGINT, and so does all that this starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt it where it still runs, and see that it has gone."""
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

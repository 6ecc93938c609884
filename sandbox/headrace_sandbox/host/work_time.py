"""The time that a program works: it computes, or it sleeps. It is the time that ``wall_s`` limits.

* Waiting for a processor that others use is not work, however many others there are.
* A program that its own threads or its own quota of processors hold up works: its processor time shows it.
* A program that sleeps works, whatever it waits for.
* A program that gets no processor for very long is a failure of ours, and never a verdict.

The program is looked at about 40 times within its limit, at random moments, so that it cannot arrange to be seen as
waiting. Between two looks counts what it computed, and the time between them too if no thread of it is runnable at the
second. So the error is that of a sample: none for a program that only computes or only sleeps.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.processes import PROC
from headrace_sandbox.result import Limits

LOOKS = 40
"""Looks at a program within its limit."""

SHORTEST_S, LONGEST_S = 0.02, 0.25
"""Bounds of the mean time between two looks."""

LATE = 2.0
"""A look that is this many times later than planned does not tell when the program fell asleep."""

CARRIED_S = 0.1
"""Most processor time that counts after the interval in which it was used: the period of the kernel's quota, of which a
program may use all at once."""

TICKS = os.sysconf("SC_CLK_TCK")

_moments = random.SystemRandom()  # not the global generator, which environments must find as they left it


class Activity(NamedTuple):
    """A look at a program: its processor time so far, and True if one of its threads computes or waits for a
    processor."""

    cpu_s: float
    is_runnable: bool


Look = Callable[[], Activity | None]
"""Looks at a program; None where its processes cannot be seen, whose time then all counts."""


class WorkClock:
    """The clock of a program that starts now. ``clock`` is monotonic, in seconds."""

    def __init__(self, look: Look, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._limits = limits
        self._clock = clock
        self._started_at = self._looked_at = clock()
        self._cpu_s = 0.0
        self._carried_s = 0.0
        self._interval_s = min(LONGEST_S, max(SHORTEST_S, limits.wall_s / LOOKS))
        self.work_s = 0.0

    def next_look_s(self) -> float | None:
        """The time until the next look is due, or None if the program has worked for ``wall_s``. Raises SandboxFailure
        ``program-starved``."""
        left_s = self._limits.wall_s - self.work_s
        if left_s <= 0:
            return None
        whole_left_s = self._limits.whole_s - (self._clock() - self._started_at)
        if whole_left_s <= 0:
            raise program_starved(self._limits)
        planned_s = min(left_s, whole_left_s, self._interval_s * _moments.uniform(0.5, 1.5))
        return max(planned_s, self._interval_s / 8)

    def add_look(self, planned_s: float) -> None:
        """Look at the program, and add its work since the last look, which was to be so long ago."""
        now = self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        activity = self._look()
        if activity is None:
            self.work_s += passed_s
            return
        computed_s = max(0.0, activity.cpu_s - self._cpu_s) / min(1.0, self._limits.cpus)
        slept_s = 0.0 if activity.is_runnable else min(passed_s, LATE * planned_s)
        self._cpu_s = activity.cpu_s
        due_s = self._carried_s + computed_s + slept_s
        counted_s = min(passed_s, due_s)
        self._carried_s = min(CARRIED_S, due_s - counted_s)
        self.work_s += counted_s

    def end(self) -> float:
        """The work of a program that ended now; the time since the last look counts in full."""
        return self.work_s + min(self._clock() - self._looked_at, 2 * self._interval_s)


def program_starved(limits: Limits) -> SandboxFailure:
    """The failure of a program that others kept from the processors for too long."""
    return SandboxFailure(
        f"The program did not get {limits.wall_s:g} s of a processor within {limits.whole_s:g} s.",
        hint="The machine runs too much at once: run fewer programs at a time.",
        kind="program-starved",
        retryable=True,
    )


def look_at_threads(threads: Callable[[], Iterable[int]], cpu_s: Callable[[], float | None]) -> Activity | None:
    """Look at a program by its threads and its processor time, which may be unknown."""
    with contextlib.suppress(OSError):
        used_s = cpu_s()
        return None if used_s is None else Activity(used_s, is_any_runnable(threads()))
    return None


def is_any_runnable(threads: Iterable[int]) -> bool:
    """True if one of these threads computes or waits for a processor, or has just ended."""
    return any(_state(f"{PROC}/{thread}/stat") == "R" for thread in threads)


def look_at_descendants(pid: int) -> Activity | None:
    """Look at a process and all that it started, where no control group counts them; None where the kernel does not
    show processes. Processes that were given to another parent are not seen."""
    ticks, is_runnable, is_seen = 0, False, False
    pending = [pid]
    while pending:
        folder = f"{PROC}/{pending.pop()}"
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat_fields(f"{folder}/stat")[11:15]))  # its own, and of children that ended
            is_seen = True
            for thread in os.listdir(f"{folder}/task"):
                is_runnable = is_runnable or _state(f"{folder}/task/{thread}/stat") == "R"
                with open(f"{folder}/task/{thread}/children") as file:
                    pending += map(int, file.read().split())
    return Activity(ticks / TICKS, is_runnable) if is_seen else None


def _state(path: str) -> str:
    """The kernel's letter for the state of a thread; R, running, for one that has just ended."""
    try:
        return _stat_fields(path)[0]
    except OSError:
        return "R"


def _stat_fields(path: str) -> list[str]:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()

"""Puts the processes of a sandbox into its control group, and on the processors that it may use."""

from __future__ import annotations

import contextlib
import itertools
import math
import os

from headrace_sandbox.host.cgroups.cgroup import Cgroup

_turns = itertools.count()


def choose_processors(cpus: float) -> set[int] | None:
    """The processors of a sandbox, so that programs that count them start no more threads than that. Sandboxes get them
    in turn; None if a sandbox may use all that this process may."""
    usable = sorted(os.sched_getaffinity(0))
    count = math.ceil(cpus)
    if count >= len(usable):
        return None
    first = next(_turns) * count
    return {usable[(first + step) % len(usable)] for step in range(count)}


def admit(pid: int, group: Cgroup, processors: set[int] | None) -> None:
    """Bound a process and its later children. Raises ProcessLookupError if it has ended, and OSError."""
    if not group.entries:  # else it has entered the group by itself
        group.add(pid)
    if processors is not None:
        os.sched_setaffinity(pid, processors)


def admit_first(pid: int, group: Cgroup, cpus: float, stack: contextlib.ExitStack) -> int | None:
    """Bound the first process of a sandbox. Returns a descriptor of it, or None if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        admit(pid, group, choose_processors(cpus))
    except ProcessLookupError:
        return None
    return pidfd

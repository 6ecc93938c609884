"""The interfaces of control groups and of their drivers.

* A group bounds and counts all processes of one execution; it serves one execution after the other.
* Groups are below one folder and carry the name of the supervisor that made them, so that a later one finds those that
  a killed one left.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import SandboxFailure
from headrace_sandbox.host.supervisor import this_supervisor
from headrace_sandbox.host.work_time import Activity, look_at_descendants, look_at_threads
from headrace_sandbox.result import Limits, Usage

ROOT = Path("/sys/fs/cgroup")

PARENT = "headrace"
"""The group above all of ours."""

PERIOD_US = 100_000
"""The period of the CPU quota: the kernel's default."""

MOST_PIDS = 1 << 22
"""The kernel's largest number of process ids."""


_numbers = itertools.count()


class Cgroup(Protocol):
    """A group, for one execution after the other. ``entries``: files into which a process writes 0 to enter the group;
    its later children are in it too. A process that enters by itself does not wait for the kernel, as one that is put
    there from outside does. Empty where the kernel has no such files."""

    entries: Sequence[str]

    def open(self, limits: Limits) -> None:
        """Set its limits, and count from here on. Raises OSError."""
        ...

    def count(self) -> None:
        """Count from here on. Raises OSError."""
        ...

    def add(self, pid: int) -> None:
        """Put a process into the group; its later children are in it too."""
        ...

    def usage(self) -> Usage:
        """The usage since it was opened."""
        ...

    def pids(self) -> list[int]:
        """The processes in it."""
        ...

    def threads(self) -> list[int]:
        """The threads in it."""
        ...

    def counted_pids(self) -> int:
        """The number of processes and threads that count in it now, including ended ones that were not reaped."""
        ...

    def held_bytes(self) -> int | None:
        """Memory of processes and of files in memory that it holds now; None where the kernel does not count it."""
        ...

    def remove(self) -> None:
        """Remove it. Raises OSError if a process is in it."""
        ...


class CgroupDriver(Protocol):
    """Makes groups. ``name`` is v1, v2 or none; ``active`` are the limits that its groups enforce."""

    name: str
    active: tuple[str, ...]

    def make(self, name: str) -> Cgroup:
        """A new group. Raises OSError."""
        ...


def new_group_name() -> str:
    """A name that no other group of this machine has."""
    return f"{this_supervisor()}-{next(_numbers)}"


def usage_between(before: Usage, now: Usage) -> Usage:
    """The usage between two counts; the peak is that of the later one."""
    if now.cpu_s is None:
        return now
    return Usage(
        cpu_s=(now.cpu_s or 0.0) - (before.cpu_s or 0.0),
        peak_memory_bytes=now.peak_memory_bytes,
        memory_kills=now.memory_kills - before.memory_kills,
        refused_pids=now.refused_pids - before.refused_pids,
    )


def look_at_group(group: Cgroup, first: int | None, before: Usage | None = None) -> Activity | None:
    """Look at the programs in a group. ``first``: the process whose descendants they are, for a group that counts
    nothing. ``before``: the usage at their start, if it was not that of the opened group."""
    usage = group.usage()
    if usage.cpu_s is None:
        return None if first is None else look_at_descendants(first)
    cpu_s = usage.cpu_s if before is None else usage_between(before, usage).cpu_s
    return look_at_threads(group.threads, lambda: cpu_s)


def no_cgroup(error: OSError) -> SandboxFailure:
    """The failure of a control group that cannot be made, or does not accept a process or its limits."""
    if error.errno == errno.EBUSY:  # the answer of version 1 to a memory limit below the memory in use
        return SandboxFailure("memory_bytes is less than a sandbox itself needs.", kind="bad-limit", retryable=False)
    return SandboxFailure(f"No control group could be made: {error}.", kind="no-cgroup", retryable=True)

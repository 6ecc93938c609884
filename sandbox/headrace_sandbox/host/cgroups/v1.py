"""Control groups of version 1: one hierarchy for each controller, as root.

* A group is a folder in each hierarchy; controllers that are mounted together share one.
* A thread of a group enters it by itself, which takes no lock of the whole machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace_sandbox.host.cgroups.cgroup import MOST_PIDS, PARENT, PERIOD_US, ROOT, Cgroup, usage_between
from headrace_sandbox.host.cgroups.control_files import list_group, named_value, read_file, write_file
from headrace_sandbox.result import Limits, Usage

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")

PROCESSORS = os.cpu_count() or 1
"""The weight of all groups together, in busy processes. With the weight of one process, programs on a busy machine
would run into their limit of time through no fault of their own."""

SOCKETS_PART = 8
"""The memory of a group's sockets may be one of so many parts of its memory, and comes on top of it: version 1 counts
the two apart."""

NO_USAGE = Usage(cpu_s=0.0, peak_memory_bytes=0)


class V1Driver:
    """The driver of version 1."""

    name = "v1"
    active: tuple[str, ...] = ("memory_bytes", "pids", "cpus", "cpu_s")

    def __init__(self, root: Path = ROOT) -> None:
        # Controllers that are mounted together are one folder under several names.
        self._folders = {name: (root / name).resolve() for name in CONTROLLERS}

    def make(self, name: str) -> Cgroup:
        for controller, folder in self._folders.items():
            if not folder.is_dir():
                raise OSError(f"the controller {controller} is not mounted")
        group = V1Group({controller: folder / PARENT / name for controller, folder in self._folders.items()})
        group.make()
        write_file(self._folders["cpu"] / PARENT / "cpu.shares", 1024 * PROCESSORS)
        return group


class V1Group:
    """A group in each hierarchy."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._memory, self._pids = folders["memory"], folders["pids"]
        self._cpu = folders["cpu"]
        self._folders = list(dict.fromkeys(folders.values()))
        # Strings, because each execution uses them several times: Path objects cost more than the kernel does.
        self._procs_files = [f"{folder}/cgroup.procs" for folder in self._folders]
        # Files for single threads, which enter by themselves: only this takes no lock that every fork and exit needs.
        self.entries: Sequence[str] = [f"{folder}/tasks" for folder in self._folders]
        self._memory_stat = f"{self._memory}/memory.stat"
        self._counters = tuple(
            str(path)
            for path in (
                folders["cpuacct"] / "cpuacct.usage",
                self._memory / "memory.max_usage_in_bytes",
                self._memory / "memory.oom_control",
                self._pids / "pids.events",
            )
        )
        self._limits: Limits | None = None
        self._before = NO_USAGE

    def make(self) -> None:
        """Make its folders. Raises OSError."""
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)

    def open(self, limits: Limits) -> None:
        if limits != self._limits:
            self._limits = None  # until all are written, some may be the old ones
            self._write_limits(limits)
            self._limits = limits
        self.count()

    def count(self) -> None:
        self._before = self._read_counters()
        write_file(self._counters[1], 0)

    def _write_limits(self, limits: Limits) -> None:
        swap = self._memory / "memory.memsw.limit_in_bytes"
        if swap.exists():
            write_file(swap, -1)  # it must never be below the next limit
        write_file(self._memory / "memory.limit_in_bytes", limits.memory_bytes)
        if swap.exists():
            write_file(swap, limits.memory_bytes)
        sockets = self._memory / "memory.kmem.tcp.limit_in_bytes"  # includes UDP, in spite of its name
        if sockets.exists():
            write_file(sockets, limits.memory_bytes // SOCKETS_PART)
        write_file(self._pids / "pids.max", min(limits.pids, MOST_PIDS))
        write_file(self._cpu / "cpu.cfs_period_us", PERIOD_US)
        write_file(self._cpu / "cpu.cfs_quota_us", round(limits.cpus * PERIOD_US))

    def add(self, pid: int) -> None:
        for path in self._procs_files:
            write_file(path, pid)

    def usage(self) -> Usage:
        return usage_between(self._before, self._read_counters())

    def _read_counters(self) -> Usage:
        cpu, peak, killed, refused = map(read_file, self._counters)
        return Usage(
            cpu_s=int(cpu) / 1e9,
            peak_memory_bytes=int(peak),
            memory_kills=named_value(killed, "oom_kill"),
            refused_pids=named_value(refused, "max"),
        )

    def pids(self) -> list[int]:
        return sorted({pid for path in self._procs_files for pid in list_group(path)})

    def threads(self) -> list[int]:
        return list(list_group(f"{self._folders[-1]}/tasks"))

    def counted_pids(self) -> int:
        return int(read_file(f"{self._pids}/pids.current"))

    def held_bytes(self) -> int | None:
        stat = read_file(self._memory_stat)
        return named_value(stat, "rss") + named_value(stat, "shmem")

    def remove(self) -> None:
        for folder in self._folders:
            folder.rmdir()

"""Control groups of version 2: one hierarchy, with the controllers delegated to this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from headrace_sandbox.host.cgroups.cgroup import MOST_PIDS, PARENT, PERIOD_US, ROOT, Cgroup, usage_between
from headrace_sandbox.host.cgroups.control_files import list_group, named_value, read_file, write_file
from headrace_sandbox.result import Limits, Usage

WEIGHT = min(100 * (os.cpu_count() or 1), 10_000)
"""The weight of all groups together: that of one busy process on each processor, up to the kernel's maximum."""

NO_USAGE = Usage(cpu_s=0.0, peak_memory_bytes=0)


class V2Driver:
    """The driver of version 2."""

    name = "v2"
    active: tuple[str, ...] = ("memory_bytes", "pids", "cpus", "cpu_s")

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def make(self, name: str) -> Cgroup:
        parent = self._root / PARENT
        parent.mkdir(exist_ok=True)
        for folder in (self._root, parent):
            write_file(folder / "cgroup.subtree_control", "+cpu +memory +pids")
        write_file(parent / "cpu.weight", WEIGHT)
        folder = parent / name
        folder.mkdir(exist_ok=True)
        return V2Group(folder)


class V2Group:
    """A group of the one hierarchy."""

    entries: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limits: Limits | None = None
        self._before = NO_USAGE

    def open(self, limits: Limits) -> None:
        folder = self._folder
        if limits != self._limits:
            self._limits = None  # until all are written, some may be the old ones
            write_file(folder / "memory.max", limits.memory_bytes)
            if (folder / "memory.swap.max").exists():
                write_file(folder / "memory.swap.max", 0)
            write_file(folder / "pids.max", min(limits.pids, MOST_PIDS))
            write_file(folder / "cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
            self._limits = limits
        self.count()

    def count(self) -> None:
        with contextlib.suppress(OSError):
            # Newer kernels can reset it; on others it is the peak of the group's whole life.
            write_file(self._folder / "memory.peak", 0)
        self._before = self._read_counters()

    def add(self, pid: int) -> None:
        write_file(self._folder / "cgroup.procs", pid)

    def usage(self) -> Usage:
        return usage_between(self._before, self._read_counters())

    def _read_counters(self) -> Usage:
        peak = self._folder / "memory.peak"
        return Usage(
            cpu_s=named_value(read_file(self._folder / "cpu.stat"), "usage_usec") / 1e6,
            peak_memory_bytes=int(read_file(peak)) if peak.exists() else None,
            memory_kills=named_value(read_file(self._folder / "memory.events"), "oom_kill"),
            refused_pids=named_value(read_file(self._folder / "pids.events"), "max"),
        )

    def pids(self) -> list[int]:
        return list(list_group(f"{self._folder}/cgroup.procs"))

    def threads(self) -> list[int]:
        return list(list_group(f"{self._folder}/cgroup.threads"))

    def counted_pids(self) -> int:
        return int(read_file(self._folder / "pids.current"))

    def held_bytes(self) -> int | None:
        stat = read_file(self._folder / "memory.stat")
        return named_value(stat, "anon") + named_value(stat, "shmem")

    def remove(self) -> None:
        self._folder.rmdir()

"""Control groups: what bounds and counts all processes of an execution together, and ends them all.

* Three drivers: v2 where this process may make groups, v1 as root, and none; which one is found out by trying.
* A group is used again once nothing runs in it; what it counts begins anew. One that cannot be emptied is not used
  again.
* Processes that ended and were not reaped yet take no room of the next program's: who reaps may be slow, or not there.
* Without a driver nothing is counted and only rlimits bound; what is not enforced is not called active.
* Groups are below one folder and carry the name of the process that made them, so that a later one finds what a killed
  one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.host import owner
from headrace_sandbox.result import Limits, Usage

ROOT = Path("/sys/fs/cgroup")

PARENT = "headrace"
"""The group below which all of ours are."""

PERIOD_US = 100_000
"""Of the CPU quota: the kernel's default."""

PROCESSORS = os.cpu_count() or 1
"""All groups together weigh as much as one busy process on each processor, not as one on all: on a busy machine a
program would run into its limit of time by no fault of its own."""

MOST_WEIGHT = 10_000
"""That the kernel takes."""

MOST_PIDS = 1 << 22
"""That the kernel takes: it has no more process ids."""

SOCKETS_PART = 8
"""What waits in sockets of a group may be one of so many parts of its memory, and comes on top of it: version 1 counts
the two apart."""

V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")

LEFT_BYTES = 8 << 20
"""Of memory that a group may hold when it is used again."""

EMPTY_S = 2.0
"""For the processes of a group to be gone once they were killed."""

NOTHING = Usage(cpu_s=0.0, peak_memory_bytes=0)

_numbers = itertools.count()


class Cgroup(Protocol):
    """A group, for one execution after the other. ``entries``: files into which a process writes 0 to be in it, as are
    its children to come. It does not wait for the kernel then, as one that is put there does. Empty where there are no
    such files."""

    entries: Sequence[str]

    def open(self, limits: Limits) -> None:
        """Set its limits, and count from here on. Raises OSError."""
        ...

    def count(self) -> None:
        """Count from here on. Raises OSError."""
        ...

    def add(self, pid: int) -> None:
        """Put a process into it; its children to come are in it too."""
        ...

    def usage(self) -> Usage:
        """What was used since it was opened."""
        ...

    def pids(self) -> list[int]:
        """What runs in it."""
        ...

    def counted_pids(self) -> int:
        """Processes and threads that count in it now, those that ended and were not reaped among them."""
        ...

    def held_bytes(self) -> int | None:
        """Memory of processes and of files in memory that it holds now; None where nothing counts it."""
        ...

    def remove(self) -> None:
        """Remove it. Raises OSError if something runs in it."""
        ...


class Driver(Protocol):
    """Makes groups. ``name`` is v1, v2 or none; ``active`` are the limits that its groups enforce."""

    name: str
    active: tuple[str, ...]

    def make(self, name: str) -> Cgroup:
        """A new group. Raises OSError."""
        ...


class Groups:
    """Groups of one driver, used again and again: making one costs milliseconds. ``take`` and ``give_back`` wait for
    the kernel; on an event loop ``taken`` and ``given_back`` do."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._free: list[Cgroup] = []
        self._stuck: list[Cgroup] = []

    def take(self, limits: Limits) -> Cgroup:
        """A group with these limits, and nothing in it. Raises SandboxFailure ``no-cgroup``."""
        try:
            group = self._clean() or self.driver.make(f"{owner.me()}-{next(_numbers)}")
            try:
                group.open(msgspec.structs.replace(limits, pids=limits.pids + group.counted_pids()))
            except OSError:
                self._remove(group)
                raise
        except OSError as error:
            raise no_cgroup(error) from error
        return group

    def _remove(self, group: Cgroup) -> None:
        try:
            group.remove()
        except OSError:
            self._stuck.append(group)

    def _clean(self) -> Cgroup | None:
        """A free one that no memory is left in: files in memory are given back a little after their processes."""
        for group in tuple(self._free):
            if (group.held_bytes() or 0) <= LEFT_BYTES:
                with contextlib.suppress(ValueError):  # another thread may have taken it
                    self._free.remove(group)
                    return group
        return None

    def give_back(self, group: Cgroup) -> None:
        """Kill what is left in it; then it may be taken again. Raises SandboxFailure ``unkillable``."""
        try:
            empty(group)
        except SandboxFailure:
            self._stuck.append(group)
            raise
        self._free.append(group)

    async def taken(self, limits: Limits) -> Cgroup:
        """As ``take``."""
        if self._free:  # most likely there is nothing to wait for
            return self.take(limits)
        taking = asyncio.ensure_future(asyncio.to_thread(self.take, limits))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, taking: asyncio.Future[Cgroup]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._free.append(taking.result())

    async def given_back(self, group: Cgroup) -> None:
        """As ``give_back``; once begun it is done, even if nobody waits for it any more."""
        if group.counted_pids() and group.pids():
            await asyncio.shield(asyncio.to_thread(self.give_back, group))
        else:
            self._free.append(group)

    def close(self) -> None:
        """Remove all that are free, and those that could not be emptied if they can be now."""
        while self._free:
            self._free.pop().remove()
        for group in self._stuck:
            with contextlib.suppress(OSError):
                group.remove()
        self._stuck.clear()


def no_cgroup(error: OSError) -> SandboxFailure:
    """The failure of a control group that cannot be made, or does not take a process or its limits."""
    if error.errno == errno.EBUSY:  # as version 1 says of a limit of memory below what is there already
        return SandboxFailure("memory_bytes is less than a sandbox itself takes.", kind="bad-limit", retryable=False)
    return SandboxFailure(f"No control group could be made: {error}.", kind="no-cgroup", retryable=True)


def empty(group: Cgroup) -> None:
    """Kill what is in a group, until nothing is. Raises SandboxFailure ``unkillable``."""
    deadline = time.monotonic() + EMPTY_S
    while pids := group.pids():
        if time.monotonic() > deadline:
            raise SandboxFailure(
                f"Processes {pids} do not end, although they were killed.",
                hint="They wait in the kernel, most likely for a disk or a network file system.",
                kind="unkillable",
                retryable=True,
            )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


def find_driver(root: Path = ROOT) -> Driver:
    """The best driver that works here, found by making a group and removing it."""
    drivers: list[Driver] = []
    if (root / "cgroup.controllers").is_file():
        drivers.append(V2(root))
    drivers.append(V1(root))
    for driver in drivers:
        try:
            group = driver.make(f"{owner.me()}-{next(_numbers)}")
            group.open(Limits())
            group.remove()
        except OSError:
            continue
        return driver
    return NoDriver()


class NoDriver:
    """Where no group can be made."""

    name = "none"
    active: tuple[str, ...] = ()

    def make(self, name: str) -> Cgroup:
        return _NoGroup()


class _NoGroup:
    entries: Sequence[str] = ()

    def open(self, limits: Limits) -> None:
        pass

    def count(self) -> None:
        pass

    def add(self, pid: int) -> None:
        pass

    def usage(self) -> Usage:
        return Usage()

    def pids(self) -> list[int]:
        return []

    def counted_pids(self) -> int:
        return 0

    def held_bytes(self) -> int | None:
        return None

    def remove(self) -> None:
        pass


class V1:
    """One hierarchy for each controller."""

    name = "v1"
    active: tuple[str, ...] = ("memory_bytes", "pids", "cpus", "cpu_s")

    def __init__(self, root: Path = ROOT) -> None:
        # Controllers that are mounted together are one folder by several names.
        self._folders = {name: (root / name).resolve() for name in V1_CONTROLLERS}

    def make(self, name: str) -> Cgroup:
        for controller, folder in self._folders.items():
            if not folder.is_dir():
                raise OSError(f"the controller {controller} is not mounted")
        group = V1Group({controller: folder / PARENT / name for controller, folder in self._folders.items()})
        group.make()
        _write(self._folders["cpu"] / PARENT / "cpu.shares", 1024 * PROCESSORS)
        return group


class V1Group:
    """A group in each hierarchy."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._memory, self._pids = folders["memory"], folders["pids"]
        self._cpu = folders["cpu"]
        self._distinct = list(dict.fromkeys(folders.values()))
        # As text, for what is done several times for each execution: paths as objects cost more than the kernel does.
        self._lists = [f"{folder}/cgroup.procs" for folder in self._distinct]
        # Of one thread, and its own: only that takes no lock of all that fork and end on this machine.
        self.entries: Sequence[str] = [f"{folder}/tasks" for folder in self._distinct]
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
        self._before = NOTHING

    def make(self) -> None:
        """Make its folders. Raises OSError."""
        for folder in self._distinct:
            folder.mkdir(parents=True, exist_ok=True)

    def open(self, limits: Limits) -> None:
        if limits != self._limits:
            self._limits = None  # some of them may hold, and others not
            self._limit(limits)
            self._limits = limits
        self.count()

    def count(self) -> None:
        self._before = self._counted()
        _write(self._counters[1], 0)

    def _limit(self, limits: Limits) -> None:
        swap = self._memory / "memory.memsw.limit_in_bytes"
        if swap.exists():
            _write(swap, -1)  # it must never be below the other one
        _write(self._memory / "memory.limit_in_bytes", limits.memory_bytes)
        if swap.exists():
            _write(swap, limits.memory_bytes)
        sockets = self._memory / "memory.kmem.tcp.limit_in_bytes"  # UDP too, in spite of its name
        if sockets.exists():
            _write(sockets, limits.memory_bytes // SOCKETS_PART)
        _write(self._pids / "pids.max", min(limits.pids, MOST_PIDS))
        _write(self._cpu / "cpu.cfs_period_us", PERIOD_US)
        _write(self._cpu / "cpu.cfs_quota_us", round(limits.cpus * PERIOD_US))

    def add(self, pid: int) -> None:
        for path in self._lists:
            _write(path, pid)

    def usage(self) -> Usage:
        return since(self._before, self._counted())

    def _counted(self) -> Usage:
        cpu, peak, killed, refused = map(_read, self._counters)
        return Usage(
            cpu_s=int(cpu) / 1e9,
            peak_memory_bytes=int(peak),
            memory_kills=_named(killed, "oom_kill"),
            refused_pids=_named(refused, "max"),
        )

    def pids(self) -> list[int]:
        return sorted({pid for path in self._lists for pid in _listed(path)})

    def counted_pids(self) -> int:
        return int(_read(f"{self._pids}/pids.current"))

    def held_bytes(self) -> int | None:
        stat = _read(self._memory_stat)
        return _named(stat, "rss") + _named(stat, "shmem")

    def remove(self) -> None:
        for folder in self._distinct:
            folder.rmdir()


class V2:
    """One hierarchy, with the controllers delegated to this process."""

    name = "v2"
    active: tuple[str, ...] = ("memory_bytes", "pids", "cpus", "cpu_s")

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def make(self, name: str) -> Cgroup:
        parent = self._root / PARENT
        parent.mkdir(exist_ok=True)
        for folder in (self._root, parent):
            _write(folder / "cgroup.subtree_control", "+cpu +memory +pids")
        _write(parent / "cpu.weight", min(100 * PROCESSORS, MOST_WEIGHT))
        folder = parent / name
        folder.mkdir(exist_ok=True)
        return V2Group(folder)


class V2Group:
    """A group of the one hierarchy."""

    entries: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limits: Limits | None = None
        self._before = NOTHING

    def open(self, limits: Limits) -> None:
        folder = self._folder
        if limits != self._limits:
            self._limits = None  # some of them may hold, and others not
            _write(folder / "memory.max", limits.memory_bytes)
            if (folder / "memory.swap.max").exists():
                _write(folder / "memory.swap.max", 0)
            _write(folder / "pids.max", min(limits.pids, MOST_PIDS))
            _write(folder / "cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
            self._limits = limits
        self.count()

    def count(self) -> None:
        with contextlib.suppress(OSError):
            # Newer kernels can reset it; on others it is that of the group's life.
            _write(self._folder / "memory.peak", 0)
        self._before = self._counted()

    def add(self, pid: int) -> None:
        _write(self._folder / "cgroup.procs", pid)

    def usage(self) -> Usage:
        return since(self._before, self._counted())

    def _counted(self) -> Usage:
        peak = self._folder / "memory.peak"
        return Usage(
            cpu_s=_named(_read(self._folder / "cpu.stat"), "usage_usec") / 1e6,
            peak_memory_bytes=int(_read(peak)) if peak.exists() else None,
            memory_kills=_named(_read(self._folder / "memory.events"), "oom_kill"),
            refused_pids=_named(_read(self._folder / "pids.events"), "max"),
        )

    def pids(self) -> list[int]:
        return list(pids_in(self._folder))

    def counted_pids(self) -> int:
        return int(_read(self._folder / "pids.current"))

    def held_bytes(self) -> int | None:
        stat = _read(self._folder / "memory.stat")
        return _named(stat, "anon") + _named(stat, "shmem")

    def remove(self) -> None:
        self._folder.rmdir()


def since(before: Usage, now: Usage) -> Usage:
    """What was used between two counts; the peak is that of the later one."""
    if now.cpu_s is None:
        return now
    return Usage(
        cpu_s=(now.cpu_s or 0.0) - (before.cpu_s or 0.0),
        peak_memory_bytes=now.peak_memory_bytes,
        memory_kills=now.memory_kills - before.memory_kills,
        refused_pids=now.refused_pids - before.refused_pids,
    )


def pids_in(folder: Path) -> Iterator[int]:
    """The processes of the group with that folder."""
    yield from _listed(f"{folder}/cgroup.procs")


def _listed(path: str) -> Iterator[int]:
    # What this process cannot see is listed as 0, which to `kill` means its own group of processes.
    yield from filter(None, map(int, Path(path).read_bytes().split()))


def _named(text: bytes, name: str) -> int:
    """A value in lines ``name value``; 0 where there is none."""
    for line in text.decode().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path | str) -> bytes:
    # Without the layers of a file object: this is done several times for each execution.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def _write(path: Path | str, value: object) -> None:
    # No buffer: the kernel's answer is that of this very write.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def group_of(pid: int, mark: str) -> Cgroup | None:
    """The group that somebody else made for this process, to be read only: its name has ``mark`` in it. None where it
    cannot be seen from here."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        places = {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}
        group: V1Group | V2Group
        if mark in places.get("memory", ""):
            group = V1Group({name: ROOT / name / places[name].lstrip("/") for name in V1_CONTROLLERS})
        elif mark in places.get("", ""):
            group = V2Group(ROOT / places[""].lstrip("/"))
        else:
            return None
        group.usage()
    except (OSError, KeyError, ValueError):
        return None
    return group

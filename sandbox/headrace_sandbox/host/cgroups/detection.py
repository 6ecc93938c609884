"""The control groups that work on this machine.

* A driver of version 2 needs a folder where this process may make groups, one of version 1 needs root; each is tried by
  making a group.
* Without a driver nothing is counted and only rlimits bound; a limit that is not enforced is not called active.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace_sandbox.host.cgroups.cgroup import ROOT, Cgroup, CgroupDriver, new_group_name
from headrace_sandbox.host.cgroups.v1 import CONTROLLERS, V1Driver, V1Group
from headrace_sandbox.host.cgroups.v2 import V2Driver, V2Group
from headrace_sandbox.result import Limits, Usage


def find_driver(root: Path = ROOT) -> CgroupDriver:
    """The best driver that works here, found by making a group and removing it."""
    drivers: list[CgroupDriver] = []
    if (root / "cgroup.controllers").is_file():
        drivers.append(V2Driver(root))
    drivers.append(V1Driver(root))
    for driver in drivers:
        try:
            group = driver.make(new_group_name())
            group.open(Limits())
            group.remove()
        except OSError:
            continue
        return driver
    return NoDriver()


class NoDriver:
    """The driver where no group can be made."""

    name = "none"
    active: tuple[str, ...] = ()

    def make(self, name: str) -> Cgroup:
        return NoGroup()


class NoGroup:
    """A group that bounds and counts nothing."""

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

    def threads(self) -> list[int]:
        return []

    def counted_pids(self) -> int:
        return 0

    def held_bytes(self) -> int | None:
        return None

    def remove(self) -> None:
        pass


def foreign_group(pid: int, mark: str) -> Cgroup | None:
    """The group with ``mark`` in its name that another program made for this process; only for reading. None where it
    cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        places = {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}
        group: V1Group | V2Group
        if mark in places.get("memory", ""):
            group = V1Group({name: ROOT / name / places[name].lstrip("/") for name in CONTROLLERS})
        elif mark in places.get("", ""):
            group = V2Group(ROOT / places[""].lstrip("/"))
        else:
            return None
        group.usage()
    except (OSError, KeyError, ValueError):
        return None
    return group

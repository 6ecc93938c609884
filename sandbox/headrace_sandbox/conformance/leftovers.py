"""Processes, mounts and control groups that a sandbox left on this machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace_sandbox.conformance.suite import Escape

GONE_S = 2.0
"""Time limit for killed processes to disappear."""


def pids_with_mark(mark: str) -> list[int]:
    """The processes of this machine with the mark in their command line."""
    return [pid for pid in _processes() if mark in _read_proc(pid, "cmdline")]


async def wait_gone(mark: str, within_s: float = GONE_S) -> None:
    """Wait until no process has the mark. Raises Escaped."""
    until = time.monotonic() + within_s
    while pids := pids_with_mark(mark):
        if time.monotonic() > until:
            raise Escape(f"the processes {pids} are still running")
        await asyncio.sleep(0.01)


def descendants(pid: int) -> set[int]:
    """All processes below this one."""
    parents = {child: _parent(child) for child in _processes()}
    below: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        below |= level
    return below


class Traces(msgspec.Struct, frozen=True):
    """Things that executions could leave on this machine: children and descriptors of this process, mounts, groups."""

    children: int
    descriptors: int
    mounts: int
    groups: int


def mounts() -> set[str]:
    """The current mounts. In the folder for temporary files only this process's own count: other programs mount there
    too."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    others = f"{tempfile.gettempdir()}/"
    return {line for line in lines if f"{os.getpid()}-" in line or not line.split()[1].startswith(others)}


def traces() -> Traces:
    """The current traces."""
    walk = os.walk("/sys/fs/cgroup")  # it tolerates groups that are removed meanwhile
    made = {name for folder, names, _ in walk if folder.endswith("/headrace") for name in names}
    groups = sum(f"{os.getpid()}-" in name for name in made)
    return Traces(len(descendants(os.getpid())), len(os.listdir("/proc/self/fd")), len(mounts()), groups)


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _parent(pid: int) -> int:
    status = _read_proc(pid, "stat")
    return int(status.rpartition(")")[2].split()[1]) if status else 0


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""

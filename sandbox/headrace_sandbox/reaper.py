"""Finds what dead supervisors left on this machine, and removes it.

* Only what carries the name of a supervisor that surely lives no more is touched.
* Processes are killed first, then their control groups and folders removed.
* What cannot be removed is named, and does not keep the rest from being removed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox import supervisor
from headrace_sandbox.cgroups import PARENT, ROOT, pids_in
from headrace_sandbox.supervisor import is_dead, kill_all, named, state_folder

FOLDERS = "made"
"""The folder of the state folder where supervisors make folders that carry their name."""


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed. ``left``: what could not be, with the reason."""

    processes: list[int] = []
    groups: list[str] = []
    folders: list[str] = []
    left: list[str] = []


def reap(root: Path = ROOT) -> Reaped:
    """Remove what dead supervisors left. Raises SandboxFailure ``no-folder``."""
    groups = [path for path in _groups(root) if _is_of_dead(path.name)]
    left: list[str] = []
    processes: list[int] = []
    try:
        processes += kill_all(lambda: [*_held_by_dead(), *(pid for path in groups for pid in pids_in(path))])
    except SandboxFailure as failure:
        left.append(failure.detail)
    folders = [path for path in _folders() if _is_of_dead(path.name)]
    for path in groups:
        try:
            path.rmdir()
        except OSError as error:
            left.append(f"{path}: {error.strerror}")
    for path in folders:
        shutil.rmtree(path, onerror=lambda _, what, error: left.append(f"{what}: {error[1]}"))
    return Reaped(
        processes=processes,
        groups=[str(path) for path in groups if not path.exists()],
        folders=[str(path) for path in folders if not path.exists()],
        left=left,
    )


def _is_of_dead(name: str) -> bool:
    maker = named(name)
    return maker is not None and is_dead(maker)


def _held_by_dead() -> Iterator[int]:
    """Processes outside of sandboxes that hold one for a dead supervisor."""
    for pid, holder in supervisor.holders():
        if is_dead(holder):
            yield pid


def _groups(root: Path) -> Iterator[Path]:
    """Control groups of all supervisors, of each hierarchy once."""
    seen: set[Path] = set()
    for parent in (root / PARENT, *root.glob(f"*/{PARENT}")):
        found = parent.resolve()
        if found in seen or not found.is_dir():
            continue
        seen.add(found)
        yield from (path for path in found.iterdir() if path.is_dir())


def _folders() -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (state_folder() / FOLDERS).iterdir()

"""Finds what dead supervisors left on this machine, and removes it.

* Only what carries the name of a supervisor that surely lives no more is touched.
* Processes are killed first, then their control groups and folders removed.
* What cannot be removed is named, and does not keep the rest from being removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.host import owner
from headrace_sandbox.host.cgroups import PARENT, ROOT, pids_in
from headrace_sandbox.host.owner import is_dead, kill_all, named, state_folder

FOLDERS = "made"
"""The folder of the state folder where supervisors make folders that carry their name."""


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed. ``left``: what could not be, with the reason."""

    processes: list[int] = []
    groups: list[str] = []
    folders: list[str] = []
    left: list[str] = []


def reap(root: Path = ROOT) -> Reaped:
    """Remove what dead supervisors left."""
    groups = [path for path in _groups(root) if _is_of_dead(path.name)]
    left: list[str] = []
    processes: list[int] = []
    try:
        processes += kill_all(lambda: [*_held_by_dead(), *_in(groups)])
    except SandboxFailure as failure:
        left.append(failure.detail)
    folders = [path for path in _folders() if _is_of_dead(path.name)]
    for path in groups:
        try:
            path.rmdir()
        except FileNotFoundError:
            continue  # another reaper was faster
        except OSError as error:
            left.append(f"{path}: {error.strerror}")
    for path in folders:
        _remove(path, left)
    return Reaped(
        processes=processes,
        groups=[str(path) for path in groups if not path.exists()],
        folders=[str(path) for path in folders if not path.exists()],
        left=left,
    )


def _remove(folder: Path, left: list[str]) -> None:
    def failed(_: object, path: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            left.append(f"{path}: {error[1]}")

    shutil.rmtree(folder, onerror=failed)


def _in(groups: Sequence[Path]) -> Iterator[int]:
    for path in groups:
        with contextlib.suppress(OSError):  # another reaper was faster: it is not there, or no group any more
            yield from pids_in(path)


def _is_of_dead(name: str) -> bool:
    maker = named(name)
    return maker is not None and is_dead(maker)


def _held_by_dead() -> Iterator[int]:
    """Processes outside of sandboxes that hold one for a dead supervisor."""
    for pid, holder in owner.holders():
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
        yield from (path for path in found.iterdir() if path.is_dir() and _is_ours(path))


def _is_ours(path: Path) -> bool:
    """Whether it was made by this user; root has what everybody made."""
    with contextlib.suppress(FileNotFoundError):  # another reaper was faster
        return os.geteuid() in (0, path.stat().st_uid)
    return False


def _folders() -> Iterator[Path]:
    # A state folder that cannot be used was not used by anybody.
    with contextlib.suppress(FileNotFoundError, SandboxFailure):
        yield from (state_folder() / FOLDERS).iterdir()

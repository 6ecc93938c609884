"""Finds processes, control groups and folders that dead supervisors left on this machine, and removes them.

* Only things that carry the name of a supervisor that has certainly ended are touched.
* Processes are killed first, then their control groups and folders are removed.
* A thing that cannot be removed is named, and the rest is removed all the same.
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
from headrace_sandbox.host.cgroups.cgroup import PARENT, ROOT
from headrace_sandbox.host.cgroups.control_files import list_group
from headrace_sandbox.host.processes import kill_all
from headrace_sandbox.host.supervisor import MADE_FOLDER, is_dead, parse_supervisor, sandbox_holders, state_folder


class ReapReport(msgspec.Struct, frozen=True, kw_only=True):
    """The things that were removed. ``left``: those that could not be, with the reason."""

    processes: list[int] = []
    groups: list[str] = []
    folders: list[str] = []
    left: list[str] = []


def reap(root: Path = ROOT) -> ReapReport:
    """Remove everything that dead supervisors left."""
    groups = [path for path in _supervisor_groups(root) if _is_of_dead_supervisor(path.name)]
    left: list[str] = []
    processes: list[int] = []
    try:
        processes += kill_all(lambda: [*_holders_of_dead_supervisors(), *_pids_in(groups)])
    except SandboxFailure as failure:
        left.append(failure.detail)
    folders = [path for path in _supervisor_folders() if _is_of_dead_supervisor(path.name)]
    for path in groups:
        try:
            path.rmdir()
        except FileNotFoundError:
            continue  # another reaper was faster
        except OSError as error:
            left.append(f"{path}: {error.strerror}")
    for path in folders:
        _remove_tree(path, left)
    return ReapReport(
        processes=processes,
        groups=[str(path) for path in groups if not path.exists()],
        folders=[str(path) for path in folders if not path.exists()],
        left=left,
    )


def _remove_tree(folder: Path, left: list[str]) -> None:
    def failed(_: object, path: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            left.append(f"{path}: {error[1]}")

    shutil.rmtree(folder, onerror=failed)


def _pids_in(groups: Sequence[Path]) -> Iterator[int]:
    for path in groups:
        with contextlib.suppress(OSError):  # another reaper was faster, and the group is gone
            yield from list_group(f"{path}/cgroup.procs")


def _is_of_dead_supervisor(name: str) -> bool:
    supervisor = parse_supervisor(name)
    return supervisor is not None and is_dead(supervisor)


def _holders_of_dead_supervisors() -> Iterator[int]:
    """Processes outside of sandboxes that keep a sandbox open for a dead supervisor."""
    for pid, supervisor in sandbox_holders():
        if is_dead(supervisor):
            yield pid


def _supervisor_groups(root: Path) -> Iterator[Path]:
    """Control groups of all supervisors, each hierarchy once."""
    parents: set[Path] = set()
    for parent in (root / PARENT, *root.glob(f"*/{PARENT}")):
        folder = parent.resolve()
        if folder in parents or not folder.is_dir():
            continue
        parents.add(folder)
        yield from (path for path in folder.iterdir() if path.is_dir() and _may_remove(path))


def _may_remove(path: Path) -> bool:
    """True if this user made the folder; root may remove all of them."""
    with contextlib.suppress(FileNotFoundError):  # another reaper was faster
        return os.geteuid() in (0, path.stat().st_uid)
    return False


def _supervisor_folders() -> Iterator[Path]:
    # An unusable state folder contains nothing to remove.
    with contextlib.suppress(FileNotFoundError, SandboxFailure):
        yield from (state_folder() / MADE_FOLDER).iterdir()

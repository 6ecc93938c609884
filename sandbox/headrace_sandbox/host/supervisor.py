"""The identity of a supervisor: a name by which a later process can tell if it still runs, and the folders it owns.

* A supervisor is a process that makes sandboxes. Its name is its process id, its start time and its namespace of
  process ids: a process that gets the same id later has another name.
* A supervisor's death is certain only within its namespace of process ids; about others nothing is claimed.
* Control groups, processes and folders that it makes carry the name. A sandbox does not see it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.processes import PROC, list_pids, start_ticks

SUPERVISOR_VARIABLE = "HEADRACE_SUPERVISOR"
"""The variable with the supervisor's name, in processes that hold a sandbox from outside; programs inside do not have
it."""

FOLDER_VARIABLE = "HEADRACE_SANDBOX_FOLDER"
"""Replaces the folder that the supervisors of this machine share."""

MADE_FOLDER = "made"
"""The part of the state folder for folders that carry a supervisor's name."""

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)(?![\d])")


class Supervisor(NamedTuple):
    """A supervisor. ``start_ticks``: its start in clock ticks since boot. ``namespace``: of process ids."""

    pid: int
    start_ticks: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_ticks}-{self.namespace}"


_this: Supervisor | None = None


def this_supervisor() -> Supervisor:
    """The identity of this process."""
    global _this
    if _this is None:
        pid = os.getpid()
        _this = Supervisor(pid, start_ticks(pid) or 0, os.stat("/proc/self/ns/pid").st_ino)
    return _this


def _forget_this_supervisor() -> None:
    global _this
    _this = None


os.register_at_fork(after_in_child=_forget_this_supervisor)  # a forked child is another supervisor


def parse_supervisor(text: str) -> Supervisor | None:
    """The supervisor whose name this text begins with."""
    match = _NAME.match(text)
    return None if match is None else Supervisor(*map(int, match.groups()))


def is_dead(supervisor: Supervisor) -> bool:
    """True if the supervisor has certainly ended."""
    return supervisor.namespace == this_supervisor().namespace and start_ticks(supervisor.pid) != supervisor.start_ticks


def sandbox_holders() -> Iterator[tuple[int, Supervisor]]:
    """The processes that hold sandboxes from outside, with their supervisors. A sandbox ends with its holder."""
    mark = f"{SUPERVISOR_VARIABLE}=".encode()
    for pid in list_pids():
        try:
            variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to another user
        for variable in variables:
            if variable.startswith(mark):
                supervisor = parse_supervisor(variable[len(mark) :].decode(errors="replace"))
                if supervisor is not None:
                    yield pid, supervisor


def state_folder() -> Path:
    """The folder that the supervisors of one user on this machine share; made if missing. Raises SandboxFailure
    ``no-folder``."""
    return checked_folder(Path(os.environ.get(FOLDER_VARIABLE) or default_state_folder()))


def owned_folder(label: str) -> Path:
    """The path of a folder that carries this supervisor's name, so that a later process removes it. Raises
    SandboxFailure ``no-folder``."""
    return state_folder() / MADE_FOLDER / f"{this_supervisor()}-{label}"


def default_state_folder() -> Path:
    """The state folder where no variable names another."""
    user = os.geteuid()
    if user == 0:
        return Path("/run/headrace-sandbox")
    own = os.environ.get("XDG_RUNTIME_DIR")
    return Path(f"{own}/headrace-sandbox" if own else f"/tmp/headrace-sandbox-{user}")


def checked_folder(folder: Path) -> Path:
    """The folder, made if missing, which no other user can write. Raises SandboxFailure ``no-folder``."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise no_folder(folder, str(error)) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise no_folder(folder, "it is not a folder that only this user can write")
    return folder


def no_folder(folder: Path, reason: str) -> SandboxFailure:
    """The failure of a state folder that cannot be used."""
    return SandboxFailure(
        f"The folder {folder}, which the supervisors of sandboxes share, cannot be used: {reason}.",
        hint=f"Name another in {FOLDER_VARIABLE}; it must belong to this user alone, and be gone after a restart.",
        kind="no-folder",
        retryable=False,
    )

"""Who made something: a supervisor, named so that a later one can tell whether it still lives.

* A supervisor is a process that makes sandboxes. It is named by its process id, when it began, and the namespace of
  process ids: an id that was given to another process later is another name.
* Whether one lives can be asked within its namespace of process ids; of others nothing is claimed.
* Control groups, processes and folders that it makes carry the name. A sandbox does not see it.
* As root a supervisor has a range of user ids that no other living one has; what runs under them when it takes the
  range was left by a dead one, and is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import signal
import stat
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import SandboxFailure

VARIABLE = "HEADRACE_SUPERVISOR"
"""In the environment of the processes that hold a sandbox from outside; what runs in it has it not."""

FOLDER_VARIABLE = "HEADRACE_SANDBOX_FOLDER"
"""Replaces the folder in which supervisors of this machine find each other."""

FIRST_UID, UIDS, RANGES = 0x60000000, 1 << 14, 1 << 10
"""User ids that no system gives to anybody: so many for each supervisor, and so many supervisors at a time."""

KILL_S = 2.0
"""For killed processes to be gone."""

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)(?![\d])")

_PROC = Path("/proc")


class Supervisor(NamedTuple):
    """A supervisor. ``began``: in clock ticks since this machine started. ``namespace``: of process ids."""

    pid: int
    began: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.began}-{self.namespace}"


_me: Supervisor | None = None


def me() -> Supervisor:
    """This process."""
    global _me
    if _me is None:
        pid = os.getpid()
        _me = Supervisor(pid, _began(pid) or 0, os.stat("/proc/self/ns/pid").st_ino)
    return _me


def named(text: str) -> Supervisor | None:
    """The supervisor whose name this text begins with."""
    found = _NAME.match(text)
    return None if found is None else Supervisor(*map(int, found.groups()))


def is_dead(supervisor: Supervisor) -> bool:
    """Whether it surely lives no more."""
    return supervisor.namespace == me().namespace and _began(supervisor.pid) != supervisor.began


def state_folder() -> Path:
    """The folder in which the supervisors of one user on this machine find each other; made if missing. Raises
    SandboxFailure ``no-folder``."""
    return _usable(Path(os.environ.get(FOLDER_VARIABLE) or _usual_folder()))


def _usable(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _no_folder(folder, str(error)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise _no_folder(folder, "it is not a folder of this user that nobody else may write")
    return folder


class UserIds:
    """The user ids of this process's sandboxes. Held until the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises SandboxFailure ``no-folder`` or ``too-many-supervisors``."""
        self._lock, number = _claim((folder or _folder_of_all()) / "users")
        self._first = FIRST_UID + number * UIDS
        self._numbers = itertools.cycle(range(UIDS))
        self._taken: weakref.WeakValueDictionary[int, subprocess.Popen[bytes]] = weakref.WeakValueDictionary()
        kill_all(lambda: _of_users(range(self._first, self._first + UIDS)))

    def next(self) -> int:
        """One under which nothing runs. Raises SandboxFailure ``no-user`` if there is none."""
        for number in itertools.islice(self._numbers, UIDS):
            holder = self._taken.get(number)
            if holder is None or holder.returncode is not None:
                return self._first + number
        raise SandboxFailure(f"All {UIDS} user ids of sandboxes are in use.", kind="no-user", retryable=True)

    def taken(self, user: int, holder: subprocess.Popen[bytes]) -> None:
        """This process holds the sandbox that runs as that user."""
        self._taken[user - self._first] = holder


_users: UserIds | None = None


def user_ids() -> UserIds:
    """Those of this process."""
    global _users
    if _users is None:
        _users = UserIds()
    return _users


def _forget() -> None:
    """A forked child is another supervisor; the lock is its parent's."""
    global _me, _users
    if _users is not None:
        os.close(_users._lock)
    _me = _users = None


os.register_at_fork(after_in_child=_forget)


def holders() -> Iterator[tuple[int, Supervisor]]:
    """The processes that hold sandboxes from outside, and for whom. A sandbox ends with them."""
    mark = f"{VARIABLE}=".encode()
    for pid in pids():
        try:
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or is another user's
        for variable in variables:
            if variable.startswith(mark) and (found := named(variable[len(mark) :].decode(errors="replace"))):
                yield pid, found


def pids() -> list[int]:
    """All processes that can be seen here."""
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _usual_folder() -> str:
    user = os.geteuid()
    if user == 0:
        return "/run/headrace-sandbox"
    own = os.environ.get("XDG_RUNTIME_DIR")
    return f"{own}/headrace-sandbox" if own else f"/tmp/headrace-sandbox-{user}"


def _folder_of_all() -> Path:
    """That of all supervisors of this user, whatever their variables say: what runs under a range is killed."""
    try:
        return _usable(Path(_usual_folder()))
    except SandboxFailure:
        return state_folder()


def _no_folder(folder: Path, why: str) -> SandboxFailure:
    return SandboxFailure(
        f"The folder {folder}, in which supervisors of sandboxes find each other, cannot be used: {why}.",
        hint=f"Name another in {FOLDER_VARIABLE}; it must be this user's alone, and gone after a restart.",
        kind="no-folder",
        retryable=False,
    )


def _claim(folder: Path) -> tuple[int, int]:
    """A range that nobody else holds: the lock, and its number."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(RANGES):
            lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return lock, number
    except OSError as error:
        raise _no_folder(folder, str(error)) from error
    raise SandboxFailure(
        f"{RANGES} processes make sandboxes on this machine; there are no more user ids.",
        hint="Let them share one service: headrace sandbox serve.",
        kind="too-many-supervisors",
        retryable=True,
    )


def _of_users(users: range) -> Iterator[int]:
    for pid in pids():
        with contextlib.suppress(OSError):
            status = (_PROC / str(pid) / "status").read_text()
            user = int(status.partition("\nUid:")[2].split(maxsplit=1)[0])
            if user in users and "\nState:\tZ" not in status:
                yield pid


def kill_all(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill what is found, again and again until nothing is; gives what was killed. Raises SandboxFailure
    ``unkillable``."""
    deadline = time.monotonic() + KILL_S
    killed: set[int] = set()
    while found := set(find()):
        if time.monotonic() > deadline:
            raise SandboxFailure(
                f"Processes {sorted(found)} do not end, although they were killed.",
                hint="They wait in the kernel, most likely for a disk or a network file system.",
                kind="unkillable",
                retryable=True,
            )
        killed |= found
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return sorted(killed)


def _began(pid: int) -> int | None:
    """When a process began; None if there is none that runs."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

"""User ids for the sandboxes of one supervisor that runs as root.

* A supervisor has a range of user ids that no other living one has.
* A process that runs under a range when a supervisor takes it was left by a dead one, and is killed.
* A user id is used again only after its sandbox has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import SandboxFailure
from headrace_sandbox.host.processes import PROC, kill_all, list_pids
from headrace_sandbox.host.supervisor import checked_folder, default_state_folder, no_folder, state_folder

FIRST_UID, UIDS, RANGES = 0x60000000, 1 << 14, 1 << 10
"""The first of the user ids, which no system assigns; ids of one supervisor; supervisors at a time."""


class UserIds:
    """The user ids of this process's sandboxes. Held until the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises SandboxFailure ``no-folder`` or ``too-many-supervisors``."""
        self._lock, number = _lock_range((folder or _shared_folder()) / "users")
        self._first = FIRST_UID + number * UIDS
        self._numbers = itertools.cycle(range(UIDS))
        self._holders: weakref.WeakValueDictionary[int, subprocess.Popen[bytes]] = weakref.WeakValueDictionary()
        kill_all(lambda: _pids_of_users(range(self._first, self._first + UIDS)))

    def next_free(self) -> int:
        """A user id under which nothing runs. Raises SandboxFailure ``no-user`` if all are in use."""
        for number in itertools.islice(self._numbers, UIDS):
            holder = self._holders.get(number)
            if holder is None or holder.returncode is not None:
                return self._first + number
        raise SandboxFailure(f"All {UIDS} user ids of sandboxes are in use.", kind="no-user", retryable=True)

    def assign(self, user: int, holder: subprocess.Popen[bytes]) -> None:
        """Record that this process holds the sandbox that runs as that user."""
        self._holders[user - self._first] = holder

    def forget(self) -> None:
        """Close the lock in a forked child; it stays the parent's."""
        os.close(self._lock)


_shared: UserIds | None = None


def shared_user_ids() -> UserIds:
    """The user ids that all runtimes of this process share."""
    global _shared
    if _shared is None:
        _shared = UserIds()
    return _shared


def _forget_shared() -> None:
    global _shared
    if _shared is not None:
        _shared.forget()
    _shared = None


os.register_at_fork(after_in_child=_forget_shared)


def _shared_folder() -> Path:
    """The same folder for all supervisors of this user, whatever their variables say: programs under a range are
    killed by the one that takes it."""
    try:
        return checked_folder(default_state_folder())
    except SandboxFailure:
        return state_folder()


def _lock_range(folder: Path) -> tuple[int, int]:
    """A range that no other process holds: the lock, and its number."""
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
        raise no_folder(folder, str(error)) from error
    raise SandboxFailure(
        f"{RANGES} processes make sandboxes on this machine; all user ids are in use.",
        hint="Let them share one service: headrace sandbox serve.",
        kind="too-many-supervisors",
        retryable=True,
    )


def _pids_of_users(users: range) -> Iterator[int]:
    for pid in list_pids():
        with contextlib.suppress(OSError):
            status = (PROC / str(pid) / "status").read_text()
            user = int(status.partition("\nUid:")[2].split(maxsplit=1)[0])
            if user in users and "\nState:\tZ" not in status:
                yield pid

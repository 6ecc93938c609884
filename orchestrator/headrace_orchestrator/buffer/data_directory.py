"""Ownership of a data directory.

* One orchestrator writes a data directory; a second one is refused, with the process id of the owner.
* The epoch grows at every start and is on disk before anything is answered; a lost epoch is not guessed.
* No service starts on a backup: it must be restored first.
* The lock is released when the owner, and every process that writes for it, has ended, however they end; a start right
  after the end of the owner waits for them.
* Symbolic links and special files in a data directory are refused before anything is read or written.
* An owner that was paused while its lock was lost and another process took the directory notices it by the epoch.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from headrace.errors import DataDirectoryInUse, SetupError
from headrace.store.log_files import require_own_log
from headrace.store.regular_files import open_descriptor, read_file, require_regular_entries
from headrace_orchestrator.buffer.durable_files import replace_file

BACKUP_MANIFEST = "backup.json"
"""The file by which a folder is recognized as a backup."""

LOCK_TRIES, LOCK_RETRY_S = 5, 0.01
"""``is_owned`` takes the lock for a moment, so one failed try does not prove that the directory has an owner."""

ENDED_OWNER_WAIT_S = 10.0
"""Seconds to wait for processes of an owner that has ended: its log writer may have a batch to bring to disk."""


class Ownership(NamedTuple):
    """The epoch of a data directory when it was claimed. Any process can check whether it is still valid."""

    path: str
    epoch: int
    inode: int
    """Inode of the epoch's file."""
    written_ns: int
    """Modification time of that file."""

    @classmethod
    def now(cls, path: Path, epoch: int) -> Self:
        """The ownership at this moment."""
        return cls(str(path), epoch, *_file_identity(path / "epoch"))

    def require(self) -> None:
        """Raises DataDirectoryInUse once another orchestrator has begun an epoch here, and OSError if that cannot be
        read. A lock can be lost without an error: its file deleted, its volume attached elsewhere."""
        path = Path(self.path)
        if _file_identity(path / "epoch") != (self.inode, self.written_ns):
            raise DataDirectoryInUse(
                f"The data directory {path} was taken by another orchestrator, of epoch {last_epoch(path)}; "
                f"this one is of epoch {self.epoch}.",
                hint="Nothing is stored here any more. End this process.",
            )


class DataDirectory:
    """A data directory that this process owns until ``close``. ``lock`` is the descriptor of the lock: a process that
    inherits it owns the directory too."""

    def __init__(self, path: Path, epoch: int, lock: int) -> None:
        self.path = path
        self.epoch = epoch
        self.lock = lock
        self.ownership = Ownership.now(path, epoch)

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Take the directory (made if missing) and start a new epoch. Raises DataDirectoryInUse or SetupError."""
        if (path / BACKUP_MANIFEST).exists():
            raise SetupError(
                f"{path} is a backup, not a data directory.",
                hint=f"`headrace restore {path} DIR` restores it into a directory that is missing or empty.",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            require_regular_entries(path)
            lock = open_descriptor(path / "owner", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SetupError(
                f"The data directory {path} cannot be used: {error.strerror}.",
                hint="Name a directory that this user may write to.",
            ) from error
        try:
            _acquire(lock, path)
            epoch = _next_epoch(path, _read_owner(lock))
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "epoch": epoch}).encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, epoch, lock)

    def write_address(self, url: str) -> None:
        """Write the address that this owner listens on to the file ``address``."""
        replace_file(self.path / "address", url.encode() + b"\n")

    def close(self) -> None:
        """Release the directory."""
        with suppress(DataDirectoryInUse, OSError):  # the address of another owner stays
            self.ownership.require()
            (self.path / "address").unlink(missing_ok=True)
        os.close(self.lock)


def require_log(path: Path) -> None:
    """Raise SetupError if this is not a data directory, or has symbolic links or special files."""
    require_own_log(path)
    require_regular_entries(path)


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Keep orchestrators out of a data directory for the block. Raises DataDirectoryInUse."""
    require_regular_entries(path)
    lock = open_descriptor(path / "owner", os.O_RDWR | os.O_CREAT)
    try:
        _acquire(lock, path)
        yield
    finally:
        os.close(lock)


def is_owned(path: Path) -> bool:
    """True if an orchestrator runs on this data directory now."""
    try:
        lock = open_descriptor(path / "owner", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _file_identity(file: Path) -> tuple[int, int]:
    """Inode and modification time: they differ if the file was replaced."""
    status = os.lstat(file)
    return status.st_ino, status.st_mtime_ns


def _acquire(lock: int, path: Path) -> None:
    tries, until = 0, time.monotonic() + ENDED_OWNER_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            tries += 1
        pid = _read_owner(lock).get("pid", 0)  # 0: the owner has the lock and has not written its process id yet
        has_ended = bool(pid) and not _is_running(pid)
        if tries >= LOCK_TRIES and not (has_ended and time.monotonic() < until):
            break
        time.sleep(LOCK_RETRY_S)
    if has_ended:
        raise DataDirectoryInUse(
            f"The data directory {path} is still locked, though its last orchestrator, process {pid}, has ended.",
            hint="Its log writer may still be writing to the disk, or a command such as fsck may be running on it. "
            "Wait for it, then start again.",
            pid=pid,
        )
    raise DataDirectoryInUse(
        f"The data directory {path} belongs to a running orchestrator, process {pid or 'unknown'}.",
        hint="Stop that orchestrator first, or use another data directory.",
        pid=pid,
    )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        pass
    with suppress(OSError):  # only Linux has this file
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def _read_owner(lock: int) -> dict[str, int]:
    """The ``pid`` and ``epoch`` that the last owner wrote; empty if they cannot be read."""
    try:
        written = json.loads(os.pread(lock, 4096, 0))
        return {"pid": int(written["pid"]), "epoch": int(written["epoch"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _next_epoch(path: Path, owner: dict[str, int]) -> int:
    file = path / "epoch"
    try:
        last = int(read_file(file))
    except FileNotFoundError as error:
        last = owner.get("epoch", 0)
        if not last and any((path / "log").glob("*.log")):
            raise SetupError(
                f"The file {file} is missing, and the log beside it is not empty.",
                hint="Write a number into it that is above every earlier epoch.",
            ) from error
    except ValueError as error:
        raise SetupError(
            f"The file {file} is damaged: its content is not a number.",
            hint="Write a number into it that is above every earlier epoch.",
        ) from error
    last = max(last, owner.get("epoch", 0))
    replace_file(file, b"%d\n" % (last + 1))
    return last + 1


def last_epoch(path: Path) -> int:
    """The highest epoch that this data directory is known to have had; 0 if none."""
    try:
        recorded = int(read_file(path / "epoch"))
    except (FileNotFoundError, ValueError):
        recorded = 0
    try:
        owner = json.loads(read_file(path / "owner"))["epoch"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        owner = 0
    return max(recorded, int(owner))

"""Ownership of a data directory.

* One orchestrator writes a data directory; a second one is told who has it.
* The epoch grows at every start and is on disk before anything is answered; a lost one is not guessed.
* A backup is no data directory: it is restored first.
* The lock goes with the process, and with those that write for it, however they end; whoever starts right after the end
  of one waits for them.
* One that stood still while its lock was lost, and another took the directory, knows it by the epoch.
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

MANIFEST = "backup.json"
"""What says of a folder that it is a backup."""

LOOKS, LOOK_S = 5, 0.01
"""Whoever asks whether a directory is owned holds its lock for a moment: one look is not enough."""

LEFT_S = 10.0
"""How long what is left of an owner that has ended is waited for: it may have a batch to bring to disk."""


class Ownership(NamedTuple):
    """Of which epoch a data directory was when it was taken. Any process can tell whether it still is."""

    path: str
    epoch: int
    inode: int
    """Of the file that has the epoch."""
    written_ns: int
    """When that was written."""

    @classmethod
    def now(cls, path: Path, epoch: int) -> Self:
        """As it is at this moment."""
        return cls(str(path), epoch, *_file_mark(path / "epoch"))

    def require(self) -> None:
        """Raises DataDirectoryInUse once another orchestrator has begun an epoch here, and OSError if that cannot be
        told. A lock can be lost without a word: its file deleted, its volume attached elsewhere."""
        path = Path(self.path)
        if _file_mark(path / "epoch") != (self.inode, self.written_ns):
            raise DataDirectoryInUse(
                f"The data directory {path} was taken by another orchestrator, of epoch {last_epoch(path)}; "
                f"this one is of epoch {self.epoch}.",
                hint="Nothing is stored here any more. End this process.",
            )


class DataDirectory:
    """A data directory that this process owns until ``close``. ``lock`` is the descriptor that says so: who has a copy
    of it owns the directory too."""

    def __init__(self, path: Path, epoch: int, lock: int) -> None:
        self.path = path
        self.epoch = epoch
        self.lock = lock
        self.ownership = Ownership.now(path, epoch)

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Take the directory (made if missing) and start a new epoch. Raises DataDirectoryInUse or SetupError."""
        if (path / MANIFEST).exists():
            raise SetupError(
                f"{path} is a backup, not a data directory.",
                hint=f"`headrace restore {path} DIR` makes one of it, in a directory that is missing or empty.",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SetupError(
                f"The data directory {path} cannot be used: {error.strerror}.",
                hint="Give a directory that this user may write.",
            ) from error
        try:
            _take(lock, path)
            epoch = _next_epoch(path, _owner(lock))
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "epoch": epoch}).encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, epoch, lock)

    def announce(self, url: str) -> None:
        """Write the address that this owner listens at to ``address``."""
        replace(self.path / "address", url.encode() + b"\n")

    def require_owned(self) -> None:
        """As ``Ownership.require``."""
        self.ownership.require()

    def close(self) -> None:
        """Give the directory up."""
        with suppress(DataDirectoryInUse, OSError):  # the address of another owner stays
            self.require_owned()
            (self.path / "address").unlink(missing_ok=True)
        os.close(self.lock)


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Keep orchestrators away from a data directory for the block. Raises DataDirectoryInUse."""
    lock = os.open(path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(lock, path)
        yield
    finally:
        os.close(lock)


def is_owned(path: Path) -> bool:
    """Whether an orchestrator runs on this data directory now."""
    try:
        lock = os.open(path / "owner", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _file_mark(file: Path) -> tuple[int, int]:
    """Tells a small file from one that was put in its place."""
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns


def _take(lock: int, path: Path) -> None:
    looks, until = 0, time.monotonic() + LEFT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            looks += 1
        pid = _owner(lock).get("pid", 0)  # 0: the owner has the lock and has not written its name yet
        has_ended = bool(pid) and not _is_running(pid)
        if looks >= LOOKS and not (has_ended and time.monotonic() < until):
            break
        time.sleep(LOOK_S)
    if has_ended:
        raise DataDirectoryInUse(
            f"The data directory {path} is still held, though its last orchestrator has ended, process {pid}.",
            hint="What that left may still be on its way to the disk, or a command such as fsck works here. Wait for "
            "it, then start again.",
            pid=pid,
        )
    raise DataDirectoryInUse(
        f"The data directory {path} belongs to a running orchestrator, process {pid or 'unknown'}.",
        hint="Stop that one first, or use another data directory.",
        pid=pid,
    )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    with suppress(OSError):  # there is no such file but on Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def _owner(lock: int) -> dict[str, int]:
    """What the last owner wrote: its ``pid`` and ``epoch``; nothing if that is not readable."""
    try:
        written = json.loads(os.pread(lock, 4096, 0))
        return {"pid": int(written["pid"]), "epoch": int(written["epoch"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _next_epoch(path: Path, owner: dict[str, int]) -> int:
    file = path / "epoch"
    try:
        last = int(file.read_bytes())
    except FileNotFoundError as error:
        last = owner.get("epoch", 0)
        if not last and any((path / "log").glob("*.log")):
            raise SetupError(
                f"The file {file} is missing, and the log beside it is not empty.",
                hint="Write into it a number above every epoch seen so far.",
            ) from error
    except ValueError as error:
        raise SetupError(
            f"The file {file} is damaged: it does not hold a number.",
            hint="Write into it a number above every epoch seen so far.",
        ) from error
    last = max(last, owner.get("epoch", 0))
    replace(file, b"%d\n" % (last + 1))
    return last + 1


def last_epoch(path: Path) -> int:
    """The highest epoch that this data directory is known to have had; 0 if none."""
    try:
        noted = int((path / "epoch").read_bytes())
    except (FileNotFoundError, ValueError):
        noted = 0
    try:
        owner = json.loads((path / "owner").read_bytes())["epoch"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        owner = 0
    return max(noted, int(owner))


def replace(file: Path, content: bytes) -> None:
    """Put a whole small file in place, durably: readers see the old one or the new one."""
    new = file.with_name(file.name + ".new")
    with open(new, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

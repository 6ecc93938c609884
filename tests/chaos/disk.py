"""A disk that forgets what was not synced: a kill keeps the page cache, a power cut does not.

* ``Disk`` runs in each process under test and notes, at each sync, what of a file or of a directory is now safe.
* ``cut_power`` makes of a data directory one that could be found after a power cut: every name and every sector of 512
  bytes that was not synced is there or is not, each by chance.
* A file's size and its name are things to be synced too: a new file whose directory was not synced may be gone.
* What SQLite writes is not seen: after a power cut the projection is as it was or gone.

It rests on POSIX alone, not on what one file system promises beyond it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""

PROJECTION = "projection.sqlite"

OWNER = "owner"
"""The file of a data directory that is locked while somebody writes there."""

ENDING_S = 30.0
"""For who writes there to be gone."""

REACHED = (0.0, 0.5, 0.5, 1.0)
"""Shares of what was not synced that reached the disk all the same; one of these a power cut."""

Names = dict[str, int]
"""What a directory holds: name → inode."""


class Watches(Protocol):
    """Told of each sync, with the path that is synced: at its start, just before anything of it is safe, and when all
    of it is."""

    def starts(self, path: Path) -> None: ...

    def still_unsafe(self, path: Path) -> None: ...

    def safe(self, path: Path) -> None: ...


class Disk:
    """Notes in the folder ``vault`` what of the folder ``data`` is synced. The vault is on the same file system: hard
    links keep every file that was ever synced, so that no inode comes back as another file.

    ``sync_s`` makes each sync last that long. ``refuses`` says of each whether it fails, as on a broken device.
    """

    def __init__(
        self,
        data: Path,
        vault: Path,
        watch: Watches,
        *,
        sync_s: float = 0.0,
        refuses: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self._data = data.resolve()
        self._vault = vault
        self._watch = watch
        self._sync_s = sync_s
        self._refuses = refuses
        vault.mkdir(parents=True, exist_ok=True)

    def install(self) -> None:
        """Take over ``os.fsync`` and ``os.fdatasync`` in this process. Nothing is really synced: the note counts."""
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self.sync)

    def sync(self, descriptor: Any) -> None:
        """Note that a file or directory is synced, given its descriptor or what has one."""
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if not path.is_relative_to(self._data):
            return
        self._watch.starts(path)
        time.sleep(self._sync_s)
        if self._refuses(path):
            raise OSError(errno.EIO, "Input/output error")
        self._watch.still_unsafe(path)
        with self._alone():
            if stat.S_ISDIR(os.fstat(number).st_mode):
                self._note_directory(path)
            elif path.exists():
                self._note_file(path)
        self._watch.safe(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process takes a note meanwhile: a note is never replaced by an older one."""
        with (self._vault / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _note_file(self, path: Path) -> None:
        inode = self._pin(path)
        self._write(f"content-{inode}", path.read_bytes())

    def _note_directory(self, path: Path) -> None:
        names = {}
        for entry in os.scandir(path):
            with suppress(FileNotFoundError):  # it is removed at this moment
                names[entry.name] = self._pin(Path(entry))
        self._write(_directory_note(path.relative_to(self._data)), json.dumps(names).encode())

    def _pin(self, path: Path) -> int:
        """Raises FileNotFoundError."""
        found = path.stat()
        pinned = self._vault / f"pin-{found.st_ino}"
        if stat.S_ISREG(found.st_mode) and not pinned.exists():
            os.link(path, pinned)
        return found.st_ino

    def _write(self, name: str, content: bytes) -> None:
        new = self._vault / f"{name}.new"
        new.write_bytes(content)
        os.replace(new, self._vault / name)


class Cut(NamedTuple):
    """What a power cut took: names of files, and bytes of those that are left."""

    names: int
    size_bytes: int


def cut_power(data: Path, vault: Path, chance: Random, reached: Sequence[float] = REACHED) -> Cut:
    """Make the directory one that could be left by a power cut now, as soon as nobody writes there: a process that is
    killed may be a moment in going. ``vault`` is forgotten: what is left is what the disk holds."""
    _await_end(data)
    rate = chance.choice(reached)
    cut = _cut_directory(data, Path(), vault, chance, rate)
    _cut_projection(data, chance)
    note_all(data, vault)
    return cut


def note_all(data: Path, vault: Path) -> None:
    """Everything that is in the directory now is on the disk."""
    shutil.rmtree(vault, ignore_errors=True)
    disk = Disk(data, vault, _Nobody())
    for folder, _, files in os.walk(data):
        for name in files:
            if not name.startswith(PROJECTION):
                disk._note_file(Path(folder, name))
        disk._note_directory(Path(folder))


def _await_end(data: Path) -> None:
    if not (data / OWNER).exists():
        return
    deadline = time.monotonic() + ENDING_S
    with (data / OWNER).open("rb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, f"somebody still writes in {data}"
            time.sleep(0.001)


class _Nobody:
    def starts(self, path: Path) -> None: ...

    def still_unsafe(self, path: Path) -> None: ...

    def safe(self, path: Path) -> None: ...


def _cut_directory(data: Path, relative: Path, vault: Path, chance: Random, rate: float) -> Cut:
    folder = data / relative
    note = vault / _directory_note(relative)
    synced: Names = json.loads(note.read_bytes()) if note.exists() else {}
    now: Names = {entry.name: entry.inode() for entry in os.scandir(folder)}
    names = size_bytes = 0
    for name in sorted(synced.keys() | now.keys()):
        if name.startswith(PROJECTION):
            continue
        path = folder / name
        kept = now.get(name) if chance.random() < rate else synced.get(name)
        names += name in now and kept != now[name]
        if kept is not None and not path.exists() and not (vault / f"pin-{kept}").exists():
            path.mkdir()  # only files are pinned: a directory whose end did not reach the disk
        if path.is_dir():
            if kept is None:
                shutil.rmtree(path)
            else:
                inner = _cut_directory(data, relative / name, vault, chance, rate)
                names, size_bytes = names + inner.names, size_bytes + inner.size_bytes
            continue
        if kept is None:
            path.unlink(missing_ok=True)
            continue
        before = path.read_bytes() if kept == now.get(name) else (vault / f"pin-{kept}").read_bytes()
        safe = vault / f"content-{kept}"
        after = _torn(safe.read_bytes() if safe.exists() else b"", before, chance, rate)
        size_bytes += sum(a != b for a, b in _sectors(after, before)) * SECTOR_BYTES
        if after != before or kept != now.get(name):
            path.unlink(missing_ok=True)
            path.write_bytes(after)
    return Cut(names, size_bytes)


def _torn(safe: bytes, written: bytes, chance: Random, rate: float) -> bytes:
    """Of a file that was ``safe`` at its last sync and is ``written`` now: each sector is the one or the other, and so
    is its size, or something between."""
    if safe == written:
        return safe
    sizes = sorted((len(safe), len(written)))
    size = chance.choice([*sizes, chance.randint(*sizes) // SECTOR_BYTES * SECTOR_BYTES])
    if rate in (0.0, 1.0):
        size = len(written) if rate else len(safe)
    size = max(size, sizes[0])
    sectors = [new if chance.random() < rate else old for old, new in _sectors(safe, written)]
    # A sector that never reached the disk, in a file whose size did, reads as zeros.
    return b"".join(sector.ljust(SECTOR_BYTES, b"\0") for sector in sectors)[:size]


def _sectors(first: bytes, second: bytes) -> list[tuple[bytes, bytes]]:
    size = max(len(first), len(second))
    return [(first[at : at + SECTOR_BYTES], second[at : at + SECTOR_BYTES]) for at in range(0, size, SECTOR_BYTES)]


def _cut_projection(data: Path, chance: Random) -> None:
    gone = chance.random() < 0.3
    for path in data.glob(f"{PROJECTION}*"):
        if gone or path.name.endswith("-shm"):
            path.unlink(missing_ok=True)


def _directory_note(relative: Path) -> str:
    return f"names-{quote(str(relative), safe='')}"

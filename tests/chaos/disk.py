"""A simulated disk that loses unsynced data in a power cut; a kill alone would keep the page cache.

* ``SimulatedDisk`` runs in each process under test and records, at each sync, the durable part of a file or directory.
* ``cut_power`` turns a data directory into one that could be left by a power cut: each name and each sector of 512
  bytes that was not synced survives or is lost at random.
* Sizes and names of files need a sync too: a new file whose directory was not synced may be lost.
* Writes of SQLite are not recorded: after a power cut the projection is unchanged or gone.

It relies on POSIX alone, not on promises of a single file system.
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
"""The unit that a disk writes atomically."""

PROJECTION = "projection.sqlite"

OWNER = "owner"
"""The file of a data directory that is locked while a process writes there."""

ENDING_S = 30.0
"""Seconds to wait for the end of the processes that write there."""

SURVIVING_SHARES = (0.0, 0.5, 0.5, 1.0)
"""Shares of the unsynced data that survive a power cut; each cut chooses one."""

Names = dict[str, int]
"""The entries of a directory: inodes by name."""


class SyncObserver(Protocol):
    """Called at each sync with its path: at the start, just before any of it is durable, and when all of it is."""

    def on_start(self, path: Path) -> None: ...

    def before_durable(self, path: Path) -> None: ...

    def on_durable(self, path: Path) -> None: ...


class SimulatedDisk:
    """Records in the folder ``synced_dir`` the durable state of the folder ``data``. Both are on one file system: hard
    links keep every file that was ever synced, so that no inode is reused for another file.

    Each sync takes ``sync_s`` seconds. ``fails`` returns True for a sync that fails, as on a broken device.
    """

    def __init__(
        self,
        data: Path,
        synced_dir: Path,
        watch: SyncObserver,
        *,
        sync_s: float = 0.0,
        fails: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self._data = data.resolve()
        self._synced_dir = synced_dir
        self._watch = watch
        self._sync_s = sync_s
        self._refuses = fails
        synced_dir.mkdir(parents=True, exist_ok=True)

    def install(self) -> None:
        """Replace ``os.fsync`` and ``os.fdatasync`` in this process. Nothing is really synced, only recorded."""
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self.sync)

    def sync(self, descriptor: Any) -> None:
        """Record a sync of a file or directory, given as a descriptor or an object with one."""
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if not path.is_relative_to(self._data):
            return
        self._watch.on_start(path)
        time.sleep(self._sync_s)
        if self._refuses(path):
            raise OSError(errno.EIO, "Input/output error")
        self._watch.before_durable(path)
        with self._exclusive():
            if stat.S_ISDIR(os.fstat(number).st_mode):
                self._record_directory(path)
            elif path.exists():
                self._record_file(path)
        self._watch.on_durable(path)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads and processes from recording, so that an older record never replaces a newer one."""
        with (self._synced_dir / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _record_file(self, path: Path) -> None:
        inode = self._pin(path)
        self._write(f"content-{inode}", path.read_bytes())

    def _record_directory(self, path: Path) -> None:
        names = {}
        for entry in os.scandir(path):
            with suppress(FileNotFoundError):  # it is being removed
                names[entry.name] = self._pin(Path(entry))
        self._write(_directory_record(path.relative_to(self._data)), json.dumps(names).encode())

    def _pin(self, path: Path) -> int:
        """Keep the file by a hard link; returns its inode. Raises FileNotFoundError."""
        status = path.stat()
        pinned = self._synced_dir / f"pin-{status.st_ino}"
        if stat.S_ISREG(status.st_mode) and not pinned.exists():
            os.link(path, pinned)
        return status.st_ino

    def _write(self, name: str, content: bytes) -> None:
        new = self._synced_dir / f"{name}.new"
        new.write_bytes(content)
        os.replace(new, self._synced_dir / name)


class PowerCut(NamedTuple):
    """The loss of a power cut: number of names, and bytes of the remaining files."""

    names: int
    size_bytes: int


def cut_power(
    data: Path, synced_dir: Path, chance: Random, surviving_shares: Sequence[float] = SURVIVING_SHARES
) -> PowerCut:
    """Turn the directory into one that a power cut could leave now, once no process writes there: a killed process may
    take a moment to end. Afterwards ``synced_dir`` records the remaining data as durable."""
    _wait_for_writers(data)
    rate = chance.choice(surviving_shares)
    cut = _cut_directory(data, Path(), synced_dir, chance, rate)
    _cut_projection(data, chance)
    mark_all_synced(data, synced_dir)
    return cut


def mark_all_synced(data: Path, synced_dir: Path) -> None:
    """Record the current content of the directory as durable."""
    shutil.rmtree(synced_dir, ignore_errors=True)
    disk = SimulatedDisk(data, synced_dir, NoObserver())
    for folder, _, files in os.walk(data):
        for name in files:
            if not name.startswith(PROJECTION):
                disk._record_file(Path(folder, name))
        disk._record_directory(Path(folder))


def _wait_for_writers(data: Path) -> None:
    if not (data / OWNER).exists():
        return
    deadline = time.monotonic() + ENDING_S
    with (data / OWNER).open("rb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, f"a process still writes in {data}"
            time.sleep(0.001)


class NoObserver:
    """A ``SyncObserver`` that does nothing."""

    def on_start(self, path: Path) -> None: ...

    def before_durable(self, path: Path) -> None: ...

    def on_durable(self, path: Path) -> None: ...


def _cut_directory(data: Path, relative: Path, synced_dir: Path, chance: Random, rate: float) -> PowerCut:
    folder = data / relative
    record = synced_dir / _directory_record(relative)
    synced: Names = json.loads(record.read_bytes()) if record.exists() else {}
    now: Names = {entry.name: entry.inode() for entry in os.scandir(folder)}
    names = size_bytes = 0
    for name in sorted(synced.keys() | now.keys()):
        if name.startswith(PROJECTION):
            continue
        path = folder / name
        kept = now.get(name) if chance.random() < rate else synced.get(name)
        names += name in now and kept != now[name]
        if kept is not None and not path.exists() and not (synced_dir / f"pin-{kept}").exists():
            path.mkdir()  # only files are pinned: the removal of a directory did not survive
        if path.is_dir():
            if kept is None:
                shutil.rmtree(path)
            else:
                inner = _cut_directory(data, relative / name, synced_dir, chance, rate)
                names, size_bytes = names + inner.names, size_bytes + inner.size_bytes
            continue
        if kept is None:
            path.unlink(missing_ok=True)
            continue
        before = path.read_bytes() if kept == now.get(name) else (synced_dir / f"pin-{kept}").read_bytes()
        safe = synced_dir / f"content-{kept}"
        after = _torn(safe.read_bytes() if safe.exists() else b"", before, chance, rate)
        size_bytes += sum(a != b for a, b in _sectors(after, before)) * SECTOR_BYTES
        if after != before or kept != now.get(name):
            path.unlink(missing_ok=True)
            path.write_bytes(after)
    return PowerCut(names, size_bytes)


def _torn(safe: bytes, written: bytes, chance: Random, rate: float) -> bytes:
    """The content of a file after a power cut: ``safe`` at its last sync, ``written`` now. Each sector is one or the
    other; the size is one of theirs, or between them."""
    if safe == written:
        return safe
    sizes = sorted((len(safe), len(written)))
    size = chance.choice([*sizes, chance.randint(*sizes) // SECTOR_BYTES * SECTOR_BYTES])
    if rate in (0.0, 1.0):
        size = len(written) if rate else len(safe)
    size = max(size, sizes[0])
    sectors = [new if chance.random() < rate else old for old, new in _sectors(safe, written)]
    # An unwritten sector in a file whose size was written reads as zeros.
    return b"".join(sector.ljust(SECTOR_BYTES, b"\0") for sector in sectors)[:size]


def _sectors(first: bytes, second: bytes) -> list[tuple[bytes, bytes]]:
    size = max(len(first), len(second))
    return [(first[at : at + SECTOR_BYTES], second[at : at + SECTOR_BYTES]) for at in range(0, size, SECTOR_BYTES)]


def _cut_projection(data: Path, chance: Random) -> None:
    gone = chance.random() < 0.3
    for path in data.glob(f"{PROJECTION}*"):
        if gone or path.name.endswith("-shm"):
            path.unlink(missing_ok=True)


def _directory_record(relative: Path) -> str:
    return f"names-{quote(str(relative), safe='')}"

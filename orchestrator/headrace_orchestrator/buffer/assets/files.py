"""The files of assets: ``<folder>/ab/abcdef...``, written whole, deleted, counted.

* A file is in place only with all its bytes on disk; of those that are written together all are in place, or none.
* Those that are written together share the work of the disk.
* What is in place is counted shelf by shelf after a start, and exactly from then on.

Everything here blocks. All but ``is_there`` is called by one thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.server import logs
from headrace.store.asset_files import asset_path
from headrace_orchestrator.buffer.data_directory import sync_directory

log = logs.logger(__name__)

T = TypeVar("T")

SYNCS = 8
"""Syncs that are under way side by side: the disk brings them down together."""

_NEW = "new"
"""The folder of what is being written; all in it is left over after a crash."""


class AssetFiles:
    """Of one folder. ``count`` and ``size_bytes`` are of all that was counted so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.size_bytes = 0
        self._counted: set[Path] = set()
        self._pool = ThreadPoolExecutor(SYNCS, thread_name_prefix="assets-sync")

    def open(self) -> None:
        """Make the folder if it is missing, and clear what a crash left half written. Raises OSError."""
        shutil.rmtree(self.folder / _NEW, ignore_errors=True)
        (self.folder / _NEW).mkdir(parents=True)
        # A name that a crash left in the page cache alone is on disk from now on.
        self._each(sync_directory, [*shelves(self.folder), self.folder, self.folder.parent])

    def is_there(self, name: str) -> bool:
        """Whether a file of that name is in place. From any thread; a few microseconds."""
        return os.path.exists(f"{self.folder}/{name[:2]}/{name}")

    def count_shelf(self, shelf: Path) -> None:
        """Count what is on a shelf, once."""
        if shelf in self._counted:
            return
        self._counted.add(shelf)
        with os.scandir(shelf) as entries:
            sizes = [entry.stat().st_size for entry in entries]
        self.count += len(sizes)
        self.size_bytes += sum(sizes)

    def write(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Put assets in place, durably, over whatever is there under their names. Raises OSError."""
        new = [self.folder / _NEW / name for name, _ in batch]
        places = [asset_path(self.folder, name) for name, _ in batch]
        placed: list[Path] = []
        try:
            self._each(_write_file, [(path, data) for path, (_, data) in zip(new, batch, strict=True)])
            used = {place.parent for place in places}
            for shelf in used:
                if not shelf.exists():
                    shelf.mkdir()
                    self._counted.add(shelf)
            replaced = [size_of(place) for place in places]
            for path, place in zip(new, places, strict=True):
                placed.append(path.rename(place))
            self._each(sync_directory, [*used, self.folder])
        except OSError:
            for path in (*new, *placed):
                with contextlib.suppress(OSError):  # then the next start clears it, or finds that nobody refers to it
                    path.unlink(missing_ok=True)
            raise
        for (_, data), place, size in zip(batch, places, replaced, strict=True):
            self._changed(place, not size, len(data) - size)

    def delete(self, names: Iterable[str]) -> list[str]:
        """Delete assets; gives those that are not there any more. One that a power loss brings back is found by the
        next start."""
        gone = []
        for name in names:
            path = asset_path(self.folder, name)
            size = size_of(path)
            try:
                path.unlink()
            except FileNotFoundError:
                gone.append(name)
            except OSError as error:
                log.error("an asset could not be deleted", asset=name, problem=error.strerror)
            else:
                gone.append(name)
                self._changed(path, -1, -size)
        return gone

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown()

    def _changed(self, place: Path, count: int, size_bytes: int) -> None:
        if place.parent in self._counted:
            self.count += count
            self.size_bytes += size_bytes

    def _each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Do the work for all, side by side where there are several. Raises the first error, when all is done."""
        if len(items) == 1:
            work(items[0])
            return
        done = [self._pool.submit(work, item) for item in items]
        for error in [future.exception() for future in done]:
            if error is not None:
                raise error


def shelves(folder: Path) -> list[Path]:
    """The folders that hold assets: 256 at most."""
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]") if path.is_dir())


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if it is not there (any more): no asset is empty."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write_file(item: tuple[Path, bytes]) -> None:
    path, data = item
    path.unlink(missing_ok=True)
    with open(path, "xb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]
        os.fsync(stream.fileno())

"""The files of assets, ``<folder>/ab/abcdef...``: written whole, deleted, counted.

* After a power cut, written assets are complete and others are absent; a failed write leaves no file of its batch.
* Written and deleted assets are counted; files that exist at a start are counted one subfolder at a time.

The files of a batch are synced concurrently. All methods block. All but ``exists`` are called by one thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.server import logs
from headrace.store.asset_files import asset_path
from headrace_orchestrator.buffer.durable_files import sync_directory

log = logs.logger(__name__)

T = TypeVar("T")

CONCURRENT_SYNCS = 8
"""Syncs that are under way at the same time: the disk carries them out together."""

_NEW = "new"
"""The subfolder of files that are being written; everything in it at a start is left over from a crash."""


class AssetFiles:
    """The files in one folder. ``count`` and ``size_bytes`` cover the subfolders that were counted so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.size_bytes = 0
        self._counted: set[Path] = set()
        self._pool = ThreadPoolExecutor(CONCURRENT_SYNCS, thread_name_prefix="assets-sync")

    def open(self) -> None:
        """Make the folder if it is missing, and remove half-written files of a crash. Raises OSError."""
        shutil.rmtree(self.folder / _NEW, ignore_errors=True)
        (self.folder / _NEW).mkdir(parents=True)
        # After a crash a name may be in the page cache only; from now on it is on disk.
        self._for_each(sync_directory, [*subfolders(self.folder), self.folder, self.folder.parent])

    def exists(self, name: str) -> bool:
        """True if a regular file of that name exists. Callable from any thread; takes a few microseconds."""
        try:
            return stat.S_ISREG(os.lstat(f"{self.folder}/{name[:2]}/{name}").st_mode)
        except FileNotFoundError:
            return False

    def count_subfolder(self, subfolder: Path) -> None:
        """Count the files of a subfolder, once."""
        if subfolder in self._counted:
            return
        self._counted.add(subfolder)
        with os.scandir(subfolder) as entries:
            sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
        self.count += len(sizes)
        self.size_bytes += sum(sizes)

    def write(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Store assets by name, durably; existing files are replaced. Raises OSError."""
        new = [self.folder / _NEW / name for name, _ in batch]
        final = [asset_path(self.folder, name) for name, _ in batch]
        renamed: list[Path] = []
        try:
            self._for_each(_write_file, [(path, data) for path, (_, data) in zip(new, batch, strict=True)])
            used = {path.parent for path in final}
            for subfolder in used:
                if not subfolder.exists():
                    subfolder.mkdir()
                    self._counted.add(subfolder)
            replaced_bytes = [size_of(path) for path in final]
            for source, target in zip(new, final, strict=True):
                renamed.append(source.rename(target))
            self._for_each(sync_directory, [*used, self.folder])
        except OSError:
            for path in (*new, *renamed):
                with contextlib.suppress(OSError):  # the next start deletes it, or collects it as unreferenced
                    path.unlink(missing_ok=True)
            raise
        for (_, data), path, size in zip(batch, final, replaced_bytes, strict=True):
            self._add_counts(path, not size, len(data) - size)

    def delete(self, names: Iterable[str]) -> list[str]:
        """Delete assets; returns those that do not exist any more. The next start finds one that a power loss brings
        back."""
        deleted = []
        for name in names:
            path = asset_path(self.folder, name)
            size = size_of(path)
            try:
                path.unlink()
            except FileNotFoundError:
                deleted.append(name)
            except OSError as error:
                log.error("an asset could not be deleted", asset=name, problem=error.strerror)
            else:
                deleted.append(name)
                self._add_counts(path, -1, -size)
        return deleted

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _add_counts(self, path: Path, count: int, size_bytes: int) -> None:
        if path.parent in self._counted:
            self.count += count
            self.size_bytes += size_bytes

    def _for_each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Do the work for all items, concurrently if there are several. Raises the first error when all is done."""
        if len(items) == 1:
            work(items[0])
            return
        done = [self._pool.submit(work, item) for item in items]
        for error in [future.exception() for future in done]:
            if error is not None:
                raise error


def subfolders(folder: Path) -> list[Path]:
    """The folders that hold assets, ``00`` to ``ff``: 256 at most."""
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]") if path.is_dir() and not path.is_symlink())


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist (no asset is empty)."""
    try:
        return path.lstat().st_size
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

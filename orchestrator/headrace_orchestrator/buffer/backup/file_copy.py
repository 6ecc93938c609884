"""Copying files so that nothing can go wrong unseen.

* Every byte that is copied is synced, read back and compared by digest.
* A file is there when it is whole: it is written beside its name first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import CorruptRecord, StoreError
from headrace.store.asset_files import FOLDER, asset_path
from headrace_orchestrator.buffer.data_directory import sync_directory

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and how many there are."""

_CHUNK_BYTES = 4 << 20
_ASSET_NAME = re.compile(r"[0-9a-f]{64}")


class LogFileDeleted(Exception):
    """A file of the log was deleted since it was listed."""


class CopyProgress:
    """Bytes that were moved so far."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self.done = 0

    def add(self, size: int) -> None:
        """So many more."""
        self.done += size
        self._on_progress(min(self.done, self._total), self._total)


def copy(source: Path, copied: Path, size: int, moved: CopyProgress) -> str:
    """Put the first ``size`` bytes of a file in place, durably; returns their SHA-256, which was compared with what is
    on disk now. Raises LogFileDeleted, FileNotFoundError for what is no file of a log, CorruptRecord, OSError."""
    partial = copied.with_name(copied.name + ".partial")
    digest = hashlib.sha256()
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        if source.suffix == ".log":
            raise LogFileDeleted from None
        raise
    with reading, partial.open("wb") as writing:
        left = size
        while left:
            chunk = reading.read(min(_CHUNK_BYTES, left))
            if not chunk:
                raise CorruptRecord(
                    f"{source} is {left} bytes shorter than it should be.", hint="`headrace fsck` names what is lost."
                )
            digest.update(chunk)
            writing.write(chunk)
            left -= len(chunk)
            moved.add(len(chunk))
        writing.flush()
        os.fsync(writing.fileno())
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not the memory
    if digest_of(partial, size) != digest.hexdigest():
        raise CorruptRecord(
            f"{partial} does not read back as it was written.", hint="The disk that it is on is failing; use another."
        )
    partial.replace(copied)
    sync_directory(copied.parent)
    return digest.hexdigest()


def copy_asset(asset: Path, directory: Path, moved: CopyProgress) -> bool:
    """Put an asset into another directory; whether it is what its name says. Raises what ``copy`` raises."""
    copied = asset_path(directory / FOLDER, asset.name)
    if not copied.parent.is_dir():
        copied.parent.mkdir(parents=True)
        sync_directory(copied.parent.parent)
    return copy(asset, copied, asset.stat().st_size, moved) == asset.name


def assets_in(directory: Path) -> Iterator[Path]:
    """The files of all assets."""
    for asset in sorted((directory / FOLDER).glob("??/*")):
        if _ASSET_NAME.fullmatch(asset.name):
            yield asset


def digest_of(path: Path, size: int) -> str:
    """SHA-256 of the first ``size`` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while size and (chunk := stream.read(min(_CHUNK_BYTES, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


@contextmanager
def disk_errors(destination: Path) -> Iterator[None]:
    """A disk that refuses is told as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or destination}: {error.strerror}.",
            hint="Mend that and run it again; what was there before is whole.",
        ) from error

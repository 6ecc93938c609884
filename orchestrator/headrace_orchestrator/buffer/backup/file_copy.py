"""Verified copies of files.

* Every copied byte is synced, read back and compared by digest.
* A file appears under its name only when it is complete: it is written under another name first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.assets import is_asset_name
from headrace.errors import CorruptRecord, StoreError
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.regular_files import open_to_read, open_to_write
from headrace_orchestrator.buffer.durable_files import sync_directory
from headrace_orchestrator.buffer.progress import OnProgress

_CHUNK_BYTES = 4 << 20


class LogFileDeleted(Exception):
    """A file of the log was deleted after it was listed."""


class CopyProgress:
    """Bytes that were copied so far."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self.done = 0

    def add(self, size: int) -> None:
        """Count more bytes as copied."""
        self.done += size
        self._on_progress(min(self.done, self._total), self._total)


def copy(source: Path, target: Path, size: int, progress: CopyProgress) -> str:
    """Copy the first ``size`` bytes of a file, durably; returns the SHA-256 that the copy on disk was verified
    against. Raises LogFileDeleted, FileNotFoundError for other missing files, CorruptRecord, OSError."""
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    try:
        reader = open_to_read(source)
    except FileNotFoundError:
        if source.suffix == ".log":
            raise LogFileDeleted from None
        raise
    with reader, open_to_write(partial) as writer:
        left = size
        while left:
            chunk = reader.read(min(_CHUNK_BYTES, left))
            if not chunk:
                raise CorruptRecord(
                    f"{source} is {left} bytes shorter than it should be.",
                    hint="`headrace fsck` lists the lost records.",
                )
            digest.update(chunk)
            writer.write(chunk)
            left -= len(chunk)
            progress.add(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
        os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the check must read the disk
    if digest_of(partial, size) != digest.hexdigest():
        raise CorruptRecord(
            f"{partial} does not read back as it was written.", hint="Its disk is failing; use another one."
        )
    partial.replace(target)
    sync_directory(target.parent)
    return digest.hexdigest()


def copy_asset(asset: Path, directory: Path, progress: CopyProgress) -> bool:
    """Copy an asset into another directory; returns whether its bytes match its name. Raises what ``copy`` raises."""
    target = asset_path(directory / FOLDER, asset.name)
    if not target.parent.is_dir():
        target.parent.mkdir(parents=True)
        sync_directory(target.parent.parent)
    return copy(asset, target, asset.stat().st_size, progress) == asset.name


def assets_in(directory: Path) -> Iterator[Path]:
    """The files of all assets."""
    for asset in sorted((directory / FOLDER).glob("??/*")):
        if is_asset_name(asset.name) and not asset.is_symlink():
            yield asset


def digest_of(path: Path, size: int) -> str:
    """SHA-256 of the first ``size`` bytes of a file."""
    digest = hashlib.sha256()
    with open_to_read(path) as stream:
        while size and (chunk := stream.read(min(_CHUNK_BYTES, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


@contextmanager
def store_errors(destination: Path) -> Iterator[None]:
    """Raise an OSError of the block as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or destination}: {error.strerror}.",
            hint="Fix the cause and run the command again; data that was stored there before is intact.",
        ) from error

"""Files of a log: reads of their frames, and deletion of old ones.

* Every read is checked against its checksum.
* A file may be deleted while a thread reads from it: that read ends as it would have.
* The content of a file can be dropped from the kernel's page cache; it can still be read.
* Few files are held open, however many there are; a process that runs out of a resource does not call a record damaged.

Sealed files never change, so another store, such as an object store, could hold them: ``LogFiles`` is the interface
that it would need, ``LocalLogFiles`` the only implementation. Appending is not part of it: one process appends to one
local file, and its durability is the log writer's promise.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Protocol

from headrace.errors import CorruptRecord, StoreError
from headrace.store import log_files, log_format
from headrace.store.log_files import path_of
from headrace.store.regular_files import open_descriptor
from headrace_orchestrator.buffer.durable_files import sync_directory

MAX_OPEN = 64
"""Files that are held open for reading, the newest: 16 GiB of the records that are read most."""

_RESOURCE_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Errors of a process that ran out of a resource: they say nothing about the record."""


class LogFiles(Protocol):
    """Files of a log. Methods may be called from any thread, and may take as long as a disk or a network does."""

    def sizes(self) -> dict[int, tuple[int, float]]:
        """Size in bytes of each file, and when it was last written (Unix time in seconds)."""

    def read(self, number: int, offset: int, length: int) -> bytes:
        """The payload of the frame at an offset, checked. Raises CorruptRecord."""

    def remove(self, number: int) -> int:
        """Delete a file; returns its bytes. Raises OSError."""

    def release_memory(self, number: int) -> None:
        """Drop a sealed file from the caches in memory: no read of it is expected."""

    def forget(self, number: int) -> None:
        """Drop all state of a file whose number is reused."""

    def close(self) -> None:
        """Release all resources."""


class LocalLogFiles:
    """The files ``NNNNNNNN.log`` of a directory. Methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open_files: dict[int, _OpenFile] = {}

    def sizes(self) -> dict[int, tuple[int, float]]:
        """Size in bytes of each file, and when it was last written (Unix time in seconds)."""
        sizes: dict[int, tuple[int, float]] = {}
        for number in log_files.numbers_in(self._directory):
            with contextlib.suppress(FileNotFoundError):  # a failed write deletes the file that it made
                status = path_of(self._directory, number).stat()
                sizes[number] = (status.st_size, status.st_mtime)
        return sizes

    def read(self, number: int, offset: int, length: int) -> bytes:
        """The payload of the frame at an offset, checked. Raises CorruptRecord that names file and offset, StoreError
        if it cannot be read at the moment."""
        try:
            # The reference keeps the descriptor open, whatever happens to the file meanwhile.
            file = self._open_files.get(number) or self._open(number)
            return log_format.read_payload(file.descriptor, offset, length, name=file.name)
        except OSError as error:
            path = path_of(self._directory, number)
            if error.errno in _RESOURCE_ERRORS:
                raise StoreError(
                    f"The file {path.name} cannot be read now: {error.strerror}.",
                    hint="Try again. Raise the limit of open files (ulimit -n) if this comes back.",
                ) from error
            raise CorruptRecord(
                f"The record at offset {offset} of {path.name} cannot be read: {error.strerror}.",
                hint="`headrace fsck` lists all damage.",
                file=path.name,
                offset=offset,
            ) from error

    def _open(self, number: int) -> _OpenFile:
        file = self._open_files.setdefault(number, _OpenFile(path_of(self._directory, number)))
        while len(self._open_files) > MAX_OPEN:
            self._open_files.pop(min(self._open_files), None)
        return file

    def remove(self, number: int) -> int:
        """Delete a file; returns its bytes. After an OSError the file still exists."""
        path = path_of(self._directory, number)
        size = path.stat().st_size
        path.unlink()
        self.forget(number)
        with contextlib.suppress(OSError):  # a power loss may bring the whole file back; then it is deleted again
            sync_directory(self._directory)
        return size

    def release_memory(self, number: int) -> None:
        """Drop a sealed file from the kernel's page cache, where the system has a call for it."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # the file was deleted
            file = _OpenFile(path_of(self._directory, number))
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def forget(self, number: int) -> None:
        """Drop the descriptor of a file whose number is reused."""
        self._open_files.pop(number, None)

    def close(self) -> None:
        """Close all files; one that a thread still reads is closed after that read."""
        self._open_files.clear()


class _OpenFile:
    """A file's name and a descriptor that is closed with its last reader."""

    __slots__ = ("descriptor", "name")

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.descriptor = -1
        self.descriptor = open_descriptor(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

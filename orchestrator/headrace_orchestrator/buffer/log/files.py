"""Files of a log on a local disk: reading what is in them, and deleting old ones.

* Every read is checked against its checksum.
* A file may be deleted while a thread reads from it: that read ends as it would have.
* What is in a file can be taken from the kernel's memory; it is read all the same.
* Few files are held open, however many there are; a process that is out of something does not call a record damaged.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from headrace.errors import CorruptRecord, StoreError
from headrace.store import log_files, log_format
from headrace.store.log_files import path_of
from headrace_orchestrator.buffer.data_directory import sync_directory

MAX_OPEN = 64
"""Files that are held open for reading, the newest: 16 GiB of what is asked for most."""

_OUT_OF = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What a process may be out of: it says nothing of the record."""


class LocalLogFiles:
    """The files ``NNNNNNNN.log`` of a directory. Methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: dict[int, _Opened] = {}

    def sizes(self) -> dict[int, tuple[int, float]]:
        """Size in bytes of each file, and when it was last written (Unix time in seconds)."""
        found: dict[int, tuple[int, float]] = {}
        for number in log_files.numbers_in(self._directory):
            with contextlib.suppress(FileNotFoundError):  # one that a failed write took back
                status = path_of(self._directory, number).stat()
                found[number] = (status.st_size, status.st_mtime)
        return found

    def read(self, number: int, offset: int, length: int) -> bytes:
        """The payload of the frame at an offset, checked. Raises CorruptRecord that names file and offset, StoreError
        where it cannot be read now."""
        try:
            # Whoever holds it keeps it open, whatever becomes of the file meanwhile.
            opened = self._opened.get(number) or self._open(number)
            return log_format.read_payload(opened.descriptor, offset, length, name=opened.name)
        except OSError as error:
            path = path_of(self._directory, number)
            if error.errno in _OUT_OF:
                raise StoreError(
                    f"The file {path.name} cannot be read now: {error.strerror}.",
                    hint="Ask again. Raise the limit of open files (ulimit -n) if this comes back.",
                ) from error
            raise CorruptRecord(
                f"The record at offset {offset} of {path.name} cannot be read: {error.strerror}.",
                hint="`headrace fsck` lists all damage.",
                file=path.name,
                offset=offset,
            ) from error

    def _open(self, number: int) -> _Opened:
        opened = self._opened.setdefault(number, _Opened(path_of(self._directory, number)))
        while len(self._opened) > MAX_OPEN:
            self._opened.pop(min(self._opened), None)
        return opened

    def remove(self, number: int) -> int:
        """Delete a file; gives its bytes. Raises OSError, and then it is there."""
        path = path_of(self._directory, number)
        size = path.stat().st_size
        path.unlink()
        self.forget(number)
        with contextlib.suppress(OSError):  # after a power loss it may be back, whole, and goes again
            sync_directory(self._directory)
        return size

    def let_go(self, number: int) -> None:
        """Have the kernel keep nothing of a sealed file in memory, where it can be told so."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # it is gone
            opened = _Opened(path_of(self._directory, number))
            os.posix_fadvise(opened.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def forget(self, number: int) -> None:
        """Another file has, or is to have, this number."""
        self._opened.pop(number, None)

    def close(self) -> None:
        """Close all files that nobody reads from."""
        self._opened.clear()


class _Opened:
    """A descriptor that is closed with its last reader, and the file's name."""

    __slots__ = ("descriptor", "name")

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

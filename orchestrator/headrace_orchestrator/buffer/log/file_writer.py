"""The disk side of the log writer: appends frames to the newest file and makes them durable.

* Frames that are reported as written are on disk, and so is the name of their file.
* In a long append the disk stores one piece while the next is packed and copied.
* After a failed write or sync the file is cut back to its durable part, and never written again.
* A file without durable content may be created again; a full file is sealed with a footer and never changed again.
* A deleted or renamed file is reported, and its frames do not count as written.
* A directory that another process took stops all writing, and nothing more is reported as written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from headrace.errors import DataDirectoryInUse
from headrace.store.log_files import path_of
from headrace.store.log_format import FrameType, pack_frame, with_digest
from headrace.store.regular_files import open_descriptor
from headrace_orchestrator.buffer.durable_files import sync_directory
from headrace_orchestrator.buffer.log.writeback import begin_writeback

_MAX_BUFFERS = 1024
"""Buffers that one ``writev`` takes: the least that POSIX allows for its maximum."""

PIECE_BYTES = 768 << 10
"""Size of one piece of a long append. Smaller pieces cost the disk more time than they save; larger ones leave it idle
for longer."""


class PendingFrame(NamedTuple):
    """A frame that is not on disk yet: the file and the offset that it is meant for, and its size there."""

    file: int
    offset: int
    kind: FrameType
    payload: bytes | memoryview
    size_bytes: int


class PartialWrite(Exception):
    """The disk failed during a batch; its first ``written`` frames are durable."""

    def __init__(self, error: OSError, written: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.written = written


class LogFileMissing(OSError):
    """The current file was deleted or renamed: frames that were reported as written to it are not in the log."""


class LogFileWriter:
    """The writer of the current file: its ``number``, the ``durable_bytes`` in it, and the ``total_bytes`` of all files
    up to it.

    ``require_owned`` raises DataDirectoryInUse, which ends all writing, or OSError."""

    def __init__(self, directory: Path, require_owned: Callable[[], None] = lambda: None) -> None:
        self.number = 0
        self.durable_bytes = 0
        self.total_bytes = 0
        self._previous_bytes = 0  # durable in the previous file
        self._directory = directory
        self._require_owned = require_owned
        self._descriptor = -1
        self._digest = hashlib.sha256()  # of all frame headers in the file

    def reopen(self, number: int, total_bytes: int, headers: bytes | memoryview) -> None:
        """Open an existing file to append to it, and make its content durable. ``total_bytes``: size of all files,
        including this one. ``headers``: the frame headers in it. Raises OSError."""
        self._descriptor = open_descriptor(path_of(self._directory, number), os.O_WRONLY | os.O_APPEND)
        sync(self._descriptor)
        sync_directory(self._directory)
        self._digest = hashlib.sha256(headers)
        self.number, self.durable_bytes = number, os.fstat(self._descriptor).st_size
        self.total_bytes = total_bytes

    def write(self, batch: Iterable[PendingFrame]) -> None:
        """Append frames to their files and sync; a new number opens a new file. The iterable may yield frames while
        others are written. Raises PartialWrite, after which only ``write_new_file`` writes again; or what
        ``require_owned`` raises."""
        written = 0
        try:
            self._require_owned()
            for number, frames in groupby(batch, key=attrgetter("file")):
                if number != self.number:
                    self._create(number)
                written += self._append(frames)
        except OSError as error:
            self._abandon_file()
            raise PartialWrite(error, written) from error

    def write_new_file(self, batch: Iterable[PendingFrame]) -> None:
        """Write frames to a new file after a failure. After an OSError nothing has changed."""
        try:
            self._require_owned()
            frames = iter(batch)
            first = next(frames)
            self._create(first.file)
            self._append(chain((first,), frames))
        except OSError:
            self._abandon_file()
            raise

    def _create(self, number: int) -> None:
        """Close the current file and open a new one. An existing file of that number holds nothing acknowledged."""
        self.close()
        path = path_of(self._directory, number)
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._previous_bytes = self.durable_bytes
        self.number, self.durable_bytes, self._digest = number, 0, hashlib.sha256()
        sync_directory(self._directory)

    def _append(self, frames: Iterable[PendingFrame]) -> int:
        """Write and sync frames of one file; returns their number."""
        end, count = self.durable_bytes, 0
        for buffers, frame_count in self._pieces(frames):
            written = _write_all(self._descriptor, buffers)
            if written >= PIECE_BYTES:
                begin_writeback(self._descriptor, end, written)
            end, count = end + written, count + frame_count
        sync(self._descriptor)
        self._require_file()
        self._require_owned()  # a new owner does not read data that is appended after its start
        self.total_bytes += end - self.durable_bytes
        self.durable_bytes = end
        return count

    def _pieces(self, frames: Iterable[PendingFrame]) -> Iterator[tuple[list[bytes | memoryview], int]]:
        """Buffers for one ``writev`` each, and the number of frames in them."""
        buffers: list[bytes | memoryview] = []
        count = size_bytes = 0
        for frame in frames:
            packed = self._pack(frame)
            if len(buffers) + len(packed) > _MAX_BUFFERS:
                yield buffers, count
                buffers, count, size_bytes = [], 0, 0
            buffers += packed
            count += 1
            size_bytes += frame.size_bytes
            if size_bytes >= PIECE_BYTES:
                yield buffers, count
                buffers, count, size_bytes = [], 0, 0
        if buffers:
            yield buffers, count

    def _pack(self, frame: PendingFrame) -> list[bytes | memoryview]:
        payload = frame.payload
        if frame.kind is FrameType.FOOTER:
            payload = with_digest(bytes(payload), self._digest.digest())
        packed = pack_frame(frame.kind, payload)
        self._digest.update(packed[0])
        return packed

    def _require_file(self) -> None:
        """Raise LogFileMissing if the file is not under its name any more: writes to a deleted file succeed."""
        path = path_of(self._directory, self.number)
        try:
            exists = os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except FileNotFoundError:
            exists = False
        if not exists:
            raise LogFileMissing(errno.ENOENT, f"its current file {path.name} was deleted or renamed")

    def _abandon_file(self) -> None:
        """Cut the file back to its durable part and close it: after a failed sync the kernel may show data that is not
        on disk. The head of the next file records the durable length too, in case the cut fails or another process owns
        the file by now."""
        if self._descriptor < 0:
            return  # a new file could not be created
        is_empty = not self.durable_bytes
        with contextlib.suppress(OSError, DataDirectoryInUse):
            self._require_owned()
            os.ftruncate(self._descriptor, self.durable_bytes)
            if is_empty:
                path_of(self._directory, self.number).unlink(missing_ok=True)
        self.close()
        if is_empty:
            # The number of an empty file is free for the next one.
            self.number, self.durable_bytes = self.number - 1, self._previous_bytes

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # everything reported as written was synced before
                os.close(descriptor)


def _write_all(descriptor: int, buffers: list[bytes | memoryview]) -> int:
    size = sum(map(len, buffers))
    written = os.writev(descriptor, buffers)
    if written < size:  # rare: write the rest as one buffer
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    return size


def sync(descriptor: int) -> None:
    """Make a file's content durable."""
    getattr(os, "fdatasync", os.fsync)(descriptor)

"""The one that writes: appends frames to the newest file of a log, and makes them durable.

* What is reported as written is on disk, and so is the name of its file.
* Of a long append the disk stores one piece while the next is packed and copied.
* A file on which a write or a sync failed is cut back to what is durable, and never written again.
* A file that nothing durable is in may be made anew; one with a footer is never touched again.
* Nothing is reported as written that is in a file which was deleted or renamed meanwhile.
* Nothing is written, and nothing reported as written, once the directory is another process's.
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
from headrace_orchestrator.buffer.data_directory import sync_directory
from headrace_orchestrator.buffer.log.writeback import begin_writeback

_MAX_BUFFERS = 1024
"""Buffers that one ``writev`` takes, by POSIX's least."""

PIECE_BYTES = 768 << 10
"""Of a long append: smaller ones cost the disk more than is won, and of larger ones too little is under way."""


class PendingFrame(NamedTuple):
    """A frame on its way to the disk: the file and the offset that it is meant for, and its size there."""

    file: int
    offset: int
    kind: FrameType
    payload: bytes | memoryview
    size_bytes: int


class PartialWrite(Exception):
    """The disk refused; ``written`` frames of the batch are durable all the same."""

    def __init__(self, error: OSError, written: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.written = written


class LogFileMissing(OSError):
    """The file that is written was deleted or renamed: what was reported as written to it is not in the log."""


class LogFileWriter:
    """The file that is written. ``number`` of it, ``durable_bytes`` in it, and bytes of all files up to it.

    ``require_owned`` raises what ends all writing, or OSError."""

    def __init__(self, directory: Path, require_owned: Callable[[], None] = lambda: None) -> None:
        self.number = 0
        self.durable_bytes = 0
        self.total_bytes = 0
        self._before_bytes = 0  # durable in the file before
        self._directory = directory
        self._require_owned = require_owned
        self._descriptor = -1
        self._digest = hashlib.sha256()  # over the headers in the file

    def go_on(self, number: int, total_bytes: int, headers: bytes | memoryview) -> None:
        """Open a file to append to it; what is in it is durable then. ``total_bytes``: of all files, it included.
        ``headers``: those that are in it. Raises OSError."""
        self._descriptor = os.open(path_of(self._directory, number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        sync(self._descriptor)
        sync_directory(self._directory)
        self._digest = hashlib.sha256(headers)
        self.number, self.durable_bytes = number, os.fstat(self._descriptor).st_size
        self.total_bytes = total_bytes

    def write(self, batch: Iterable[PendingFrame]) -> None:
        """Append frames to their files and sync; a new number opens a new file. Frames may come while others are
        written. Raises PartialWrite, and then writes no more until ``start_over``; or what ``require_owned`` raises."""
        written = 0
        try:
            self._require_owned()
            for number, frames in groupby(batch, key=attrgetter("file")):
                if number != self.number:
                    self._make(number)
                written += self._append(frames)
        except OSError as error:
            self._give_up()
            raise PartialWrite(error, written) from error

    def start_over(self, batch: Iterable[PendingFrame]) -> None:
        """Write frames to a new file after a failure, if the disk takes them now. Raises OSError, and then nothing has
        changed."""
        try:
            self._require_owned()
            frames = iter(batch)
            first = next(frames)
            self._make(first.file)
            self._append(chain((first,), frames))
        except OSError:
            self._give_up()
            raise

    def _make(self, number: int) -> None:
        """Open a new file in place of the one before. Nothing that may be under its name was ever acknowledged."""
        self._close()
        path = path_of(self._directory, number)
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._before_bytes = self.durable_bytes
        self.number, self.durable_bytes, self._digest = number, 0, hashlib.sha256()
        sync_directory(self._directory)

    def _append(self, frames: Iterable[PendingFrame]) -> int:
        """Write and sync frames of one file; gives their number."""
        at, count = self.durable_bytes, 0
        for buffers, held in self._pieces(frames):
            written = _write_all(self._descriptor, buffers)
            if written >= PIECE_BYTES:
                begin_writeback(self._descriptor, at, written)
            at, count = at + written, count + held
        sync(self._descriptor)
        self._require_there()
        self._require_owned()  # what came behind the other one's start is not read by it
        self.total_bytes += at - self.durable_bytes
        self.durable_bytes = at
        return count

    def _pieces(self, frames: Iterable[PendingFrame]) -> Iterator[tuple[list[bytes | memoryview], int]]:
        """Buffers for one ``writev`` each, and how many frames are in them."""
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

    def _require_there(self) -> None:
        """A deleted file takes data as any other. Raises OSError."""
        path = path_of(self._directory, self.number)
        try:
            there = os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except FileNotFoundError:
            there = False
        if not there:
            raise LogFileMissing(errno.ENOENT, f"the file {path.name}, which is written, was deleted or renamed")

    def _give_up(self) -> None:
        """Cut the file back: after a failed sync the kernel may show what is not on disk as if it were. The head of the
        next file says it as well, for where the cut fails, or where the file may be another process's by now."""
        if self._descriptor < 0:
            return  # not even a new file could be made
        is_empty = not self.durable_bytes
        with contextlib.suppress(OSError, DataDirectoryInUse):
            self._require_owned()
            os.ftruncate(self._descriptor, self.durable_bytes)
            if is_empty:
                path_of(self._directory, self.number).unlink(missing_ok=True)
        self._close()
        if is_empty:
            # A file that nothing is in is as good as none: its number is free for the next one.
            self.number, self.durable_bytes = self.number - 1, self._before_bytes

    def close(self) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # all that counts of it was synced before
                os.close(descriptor)


def _write_all(descriptor: int, buffers: list[bytes | memoryview]) -> int:
    size = sum(map(len, buffers))
    written = os.writev(descriptor, buffers)
    if written < size:  # rare: the rest in one piece
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    return size


def sync(descriptor: int) -> None:
    """Make a file's content durable."""
    getattr(os, "fdatasync", os.fsync)(descriptor)

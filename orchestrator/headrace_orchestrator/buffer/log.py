"""The log: the truth of a data directory. One writer, append-only files, group commit.

* Acknowledged means on disk: ``synced`` returns when all that was appended before the call is.
* One sync covers all frames that are waiting; the event loop never waits for the disk.
* A failed write or sync seals the file; it is never tried on that file again, and every waiter is told.
* A torn tail is cut when the log is opened; damage in the middle is reported and costs that record only.
* Every read is checked against its checksum.
* A directory that holds something else than a log is refused, and the file is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headrace import logformat
from headrace.errors import CorruptRecord, SetupError, StoreError
from headrace.ids import new_id
from headrace.logformat import Frame, FrameType
from headrace_orchestrator.buffer.directory import replace, sync_directory

_OFFSET_BITS = 40
"""Bits of a position that hold the offset in its file: files are far smaller than a tebibyte."""

OnSync = Callable[[float, int], None]
"""Called after each group commit with its duration in seconds and its bytes."""


class Location(NamedTuple):
    """Where a payload is: number of the file, offset of its frame, length of the payload in bytes."""

    file: int
    offset: int
    length: int

    @property
    def position(self) -> int:
        """One number that grows along the log."""
        return self.file << _OFFSET_BITS | self.offset

    @classmethod
    def at(cls, position: int, length: int) -> Location:
        return cls(position >> _OFFSET_BITS, position & ((1 << _OFFSET_BITS) - 1), length)


class Placed(NamedTuple):
    """A frame that was read, and where it is."""

    frame: Frame
    location: Location


class Lost(NamedTuple):
    """Damage that was found in the log: so many bytes at an offset of a file."""

    file: str
    offset: int
    length: int
    problem: str


class Log:
    """The files ``<directory>/NNNNNNNN.log``. Use ``scan`` to its end once, then append."""

    def __init__(self, directory: Path, *, file_bytes: int, on_sync: OnSync = lambda duration_s, size: None) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._on_sync = on_sync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._writer = _Writer(directory)
        self._descriptors: dict[int, int] = {}
        self._file, self._offset = 0, 0
        self._bytes_before = 0  # in files before the current one
        self._appended, self._durable = 0, 0  # counts of frames
        self._queue: list[tuple[int, bytes]] = []
        self._unwritten: dict[tuple[int, int], bytes] = {}
        self._flushing = False
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.failure = ""
        self.scanned_bytes = 0
        directory.mkdir(parents=True, exist_ok=True)
        self.id = _identity(directory / "id")
        """Made once and kept beside the files: tells what belongs to this log from what belongs to another."""
        self._found = sorted(_number(path) for path in directory.glob("*.log"))
        sizes = [_path(directory, number).stat().st_size for number in self._found]
        self.found_bytes = sum(sizes)
        self.found_end = Location(self._found[-1], sizes[-1], 0).position if sizes else 0

    # Opening --------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Placed | Lost]:
        """Everything in the log, in order; at the end the torn tail is cut and the log is open for appending.

        Blocking: run it in a thread. ``scanned_bytes`` grows up to ``found_bytes`` meanwhile.
        """
        for number in self._found:
            path = _path(self._directory, number)
            sealed = path.with_suffix(".sealed")
            if sealed.exists():
                # Frames behind the last good sync were never acknowledged, and may exist in the page cache only.
                os.truncate(path, min(_sealed_bytes(sealed), path.stat().st_size))
            yield from self._scan_file(number, path, last=number == self._found[-1])
            self._bytes_before += path.stat().st_size
        self._begin()

    def _scan_file(self, number: int, path: Path, *, last: bool) -> Iterator[Placed | Lost]:
        size = path.stat().st_size
        base = self.scanned_bytes
        with open(path, "rb") as stream:
            for item in logformat.scan(stream):
                self.scanned_bytes = base + item.offset
                if isinstance(item, Frame):
                    yield Placed(item, Location(number, item.offset, len(item.payload)))
                elif item.torn and last:
                    os.truncate(path, item.offset)
                else:
                    yield Lost(path.name, item.offset, item.size, item.problem)
        self.scanned_bytes = base + size

    def _begin(self) -> None:
        """Go on behind what was found; what was read is made durable first, for it will be built upon."""
        try:
            if self._found and not _path(self._directory, self._found[-1]).with_suffix(".sealed").exists():
                self._file = self._found[-1]
                self._offset = self._writer.open(self._file)
                self._bytes_before -= self._offset
            else:
                self._file = self._found[-1] + 1 if self._found else 1
                self._offset = self._writer.open(self._file)
        except OSError as error:
            raise self._refused(error) from error

    # Writing --------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, what is still to be written included."""
        return self._bytes_before + self._offset

    @property
    def tail(self) -> int:
        """Position where the next frame will be."""
        return Location(self._file, self._offset, 0).position

    def append(self, kind: FrameType, payload: bytes) -> Location:
        """Queue a frame. It is on disk once a later ``synced`` returns. Raises StoreError after a failure."""
        if self.failure:
            raise self._closed()
        frame = b"".join(logformat.pack_frame(kind, payload))
        if self._offset and self._offset + len(frame) > self._file_bytes:
            self._bytes_before += self._offset
            self._file, self._offset = self._file + 1, 0
        location = Location(self._file, self._offset, len(payload))
        self._offset += len(frame)
        self._appended += 1
        self._queue.append((self._file, frame))
        self._unwritten[self._file, location.offset] = payload
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        return location

    def stop(self, problem: str) -> None:
        """Take nothing more, and tell every waiter: what was decided and what is stored are not the same any more."""
        self.failure = self.failure or problem
        self._tell_waiters()

    async def synced(self) -> None:
        """Returns when everything appended so far is on disk. Raises StoreError if it will never be."""
        if self.failure:
            raise self._closed()
        if self._durable == self._appended:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._appended, waiter))
        await waiter
        if self.failure:
            raise self._closed()

    def _flush(self) -> None:
        """Hand all that waits to the thread; what is appended meanwhile goes with the next round."""
        batch, self._queue = self._queue, []
        upto = self._appended
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._writer.write, batch)
        done.add_done_callback(lambda future: self._flushed(future, batch, upto))

    def _flushed(self, done: asyncio.Future[float], batch: list[tuple[int, bytes]], upto: int) -> None:
        self._flushing = False
        error = done.exception()
        if error is not None:
            self.failure = f"{error.strerror or error}" if isinstance(error, OSError) else repr(error)
        else:
            self._durable = upto
            self._on_sync(done.result(), sum(len(frame) for _, frame in batch))
            self._forget_written(len(batch))
        self._tell_waiters()
        if self._queue and not self.failure:
            self._flushing = True
            self._flush()

    def _tell_waiters(self) -> None:
        while self._waiters and (self.failure or self._waiters[0][0] <= self._durable):
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    def _forget_written(self, frames: int) -> None:
        for key in list(islice(self._unwritten, frames)):  # in the order in which they were appended
            del self._unwritten[key]

    def _closed(self) -> StoreError:
        return StoreError(
            f"The log in {self._directory} cannot be written: {self.failure}.",
            hint="This request may not be stored. Mend what failed, then restart the orchestrator and ask again.",
        )

    def _refused(self, error: OSError) -> StoreError:
        self.failure = error.strerror or str(error)
        return self._closed()

    def files(self) -> set[int]:
        """The numbers of all files that there are. Blocking."""
        return {_number(path) for path in self._directory.glob("*.log")}

    # Reading --------------------------------------------------------------------------------------------------

    def read(self, location: Location) -> bytes:
        """A payload, checked. Raises CorruptRecord that names file and offset. May be called from any thread."""
        waiting = self._unwritten.get((location.file, location.offset))
        if waiting is not None:
            return waiting
        name = _path(self._directory, location.file).name
        try:
            descriptor = self._descriptor(location.file)
            return logformat.read_payload(descriptor, location.offset, location.length, name=name)
        except OSError as error:
            raise CorruptRecord(
                f"The record at offset {location.offset} of {name} cannot be read: {error.strerror}.",
                hint="`headrace fsck` lists all damage.",
                file=name,
                offset=location.offset,
            ) from error

    def _descriptor(self, number: int) -> int:
        descriptor = self._descriptors.get(number)
        if descriptor is None:
            descriptor = os.open(_path(self._directory, number), os.O_RDONLY | os.O_CLOEXEC)
            descriptor = self._descriptors.setdefault(number, descriptor)
        return descriptor

    async def close(self) -> None:
        """Write what waits, and close all files."""
        try:
            if not self.failure:
                await self.synced()
        finally:
            self._thread.shutdown()
            self._writer.close()
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


class _Writer:
    """The file that is written. Used by the log's thread only, once the log is open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._descriptor = -1
        self._synced_bytes = 0

    def open(self, number: int) -> int:
        """Open or make a file; returns its size, durable."""
        path = _path(self._directory, number)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._number = number
        _sync(self._descriptor)
        sync_directory(self._directory)
        self._synced_bytes = os.fstat(self._descriptor).st_size
        return self._synced_bytes

    def write(self, batch: list[tuple[int, bytes]]) -> float:
        """Append frames to their files and sync; returns the seconds that it took. Raises OSError, once."""
        begun = time.perf_counter()
        try:
            first = 0
            while first < len(batch):
                number = batch[first][0]
                last = next((i for i in range(first, len(batch)) if batch[i][0] != number), len(batch))
                if number != self._number:
                    os.close(self._descriptor)
                    self.open(number)
                self._append(b"".join(frame for _, frame in batch[first:last]))
                first = last
        except OSError:
            self._seal()
            raise
        return time.perf_counter() - begun

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        _sync(self._descriptor)
        self._synced_bytes += len(data)

    def _seal(self) -> None:
        """Note beside the file how much of it is good. After a failed sync the kernel may show the rest as written."""
        path = _path(self._directory, self._number).with_suffix(".sealed")
        with contextlib.suppress(OSError):  # the disk is failing; then the next start has to trust what it reads
            replace(path, b"%d\n" % self._synced_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.log"


def _number(path: Path) -> int:
    if not (path.stem.isascii() and path.stem.isdigit() and len(path.stem) == 8):
        raise SetupError(
            f"The file {path} is no file of this log.", hint="Move it away: a log's files are named by eight digits."
        )
    return int(path.stem)


def _sealed_bytes(path: Path) -> int:
    try:
        return int(path.read_bytes())
    except ValueError as error:
        raise SetupError(
            f"The file {path} is damaged: it does not hold a number.",
            hint="Delete it to trust all that reads well in the file of the same number.",
        ) from error


def _identity(path: Path) -> str:
    if not path.exists():
        replace(path, f"{new_id()}\n".encode())
    return path.read_text().strip()


def _sync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)

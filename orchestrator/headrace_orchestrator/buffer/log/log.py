"""The log: the source of truth of a data directory. One writer, append-only files, group commit.

* Acknowledged means on disk: ``synced`` returns when everything that was appended before the call is on disk.
* One sync covers all waiting frames; the event loop never waits for the disk.
* A full file is sealed with a footer and never changed again; the next one opens with the current control state.
* After a failed write or sync the file is cut to its durable part and never written again, and every waiter gets the
  error.
* Frames that were appended and not stored are kept, and go to a new file as soon as the disk accepts one.
* A torn tail is cut when the log is opened; damage in the middle is reported and costs that record only.
* Every read is checked against its checksum.
* A directory that holds something other than a log is refused, and the file is named.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.common.ids import new_id
from headrace.errors import CorruptRecord, DataDirectoryInUse, StoreError
from headrace.store import log_files, log_format
from headrace.store.log_files import LogFile, path_of
from headrace.store.log_format import Damage, FileHead, FooterBuilder, Frame, FrameType
from headrace.store.regular_files import truncate
from headrace_orchestrator.buffer.durable_files import sync_directory
from headrace_orchestrator.buffer.log.file_writer import PendingFrame
from headrace_orchestrator.buffer.log.files import LocalLogFiles, LogFiles
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location, file_at, start_of
from headrace_orchestrator.buffer.log.writer import DiskFailure, LogWriter, WriteResult
from headrace_orchestrator.buffer.log.writer_thread import LogWriterThread

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 8.0
"""Seconds until the disk is tried again after a failure; the wait doubles from the first number up to the second."""

BATCH_BYTES = 8 << 20
"""Size up to which waiting frames go to the writer as one batch (a larger frame goes alone; a batch to a new file after
a failure has no bound): copying this much to a writer process holds the event loop for some two milliseconds."""

OnSync = Callable[[float, int], None]
"""Called after each group commit with its duration in seconds and its bytes."""


class LocatedFrame(NamedTuple):
    """A frame that was read, and its location."""

    frame: Frame
    location: Location

    @property
    def end(self) -> int:
        """Position behind it."""
        return self.location.position + self.frame.size


class LostRange(NamedTuple):
    """Damage in the log: offset and length in a file."""

    file: str
    offset: int
    length: int
    problem: str


Relocations = Mapping[int, Location]
"""New locations by old positions, of frames that were stored elsewhere than planned."""


_FILE_FRAMES = frozenset((FrameType.FILE_HEAD, FrameType.FOOTER))
_PHASES = {errno.ENOSPC: "disk full", errno.EDQUOT: "disk quota used up", errno.EROFS: "disk is read-only"}
_encoder = msgspec.msgpack.Encoder()


class _CurrentFile:
    """The file that frames are appended to: the offset of the next frame, and the content of the footer."""

    def __init__(self, number: int, opened_ms: int) -> None:
        self.number = number
        self.footer = FooterBuilder(opened_ms)
        self.opened_ms = opened_ms
        self.offset = 0
        self.head_bytes = 0
        self.headers = bytearray()
        """Headers of the frames that were read in it."""
        self.is_appendable = True
        """True if more frames may be appended to it."""

    def add(self, kind: FrameType, payload: bytes | memoryview) -> PendingFrame:
        """Plan a frame behind the last one."""
        frame = PendingFrame(self.number, self.offset, kind, payload, log_format.frame_bytes(kind, len(payload)))
        self.footer.place(kind, self.offset)
        self.offset += frame.size_bytes
        self.head_bytes = self.head_bytes or self.offset
        return frame

    def add_read(self, item: Frame | Damage) -> None:
        """Count an item that was read in it, in order."""
        if isinstance(item, Frame):
            header = log_format.header_of(item)
            self.footer.add(item.type, item.offset, header)
            self.headers += header
            self.offset = item.offset + item.size
            self.head_bytes = self.head_bytes or self.offset
            self.is_appendable = self.is_appendable and item.type is not FrameType.FOOTER
        elif not item.torn:
            self.is_appendable = False


class Log:
    """The log in ``directory``. Call ``scan`` once and read it to its end, then ``start``, then append.

    ``require_owned`` raises DataDirectoryInUse once another process writes here. ``on_failure`` is called when the disk
    fails, ``on_recovery`` when it has stored the waiting frames. ``writer``: a thread by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        file_bytes: int,
        epoch: int = 0,
        require_owned: Callable[[], None] = lambda: None,
        on_sync: OnSync = lambda duration_s, size: None,
        on_failure: Callable[[], None] = lambda: None,
        on_recovery: Callable[[], None] = lambda: None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        writer: LogWriter | None = None,
    ) -> None:
        self.on_relocated: Callable[[Relocations], None] = lambda relocations: None
        """Called with the frames that moved, before anything else happens on a recovery."""
        self.failure = ""
        """The reason why nothing can be stored now; empty when all is well."""
        self.phase = ""
        """The failure in a word or two."""
        self.stopped = False
        """True if only a restart helps."""
        self.needs_state = False
        """True if stored frames were deleted, so that only a new control state covers all decisions."""
        self.files: LogFiles = LocalLogFiles(directory)
        """The stored frames, by files."""
        self._directory = directory
        self._file_bytes = file_bytes
        self._epoch = epoch
        self._on_sync, self._on_failure, self._on_recovery = on_sync, on_failure, on_recovery
        self._clock_ms = clock_ms
        self._require_owned = require_owned
        self._writer = writer or LogWriterThread(directory, require_owned)
        self._writer.on_end = self.stop
        self._last_result = WriteResult(0, 0, 0.0, 0, 0, 0)
        self._current = _CurrentFile(0, 0)
        self._previous_bytes = 0  # in files before the current one
        self._removed_bytes = 0  # of files that were deleted since the log was opened
        self._appended, self._durable = 0, 0  # counts of frames
        self._queue: deque[PendingFrame] = deque()
        self._writing = False  # the writer has a batch, or is about to get one
        self._started = self._closing = False
        self._unwritten: dict[int, bytes] = {}
        self._removals: set[asyncio.Task[int]] = set()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_s = FIRST_RETRY_S
        directory.mkdir(parents=True, exist_ok=True)
        self._numbers = log_files.numbers_in(directory)
        self._scanned_last: _CurrentFile | None = None
        self.id = ""
        """Created once and stored in every file: tells this log's files from those of another log."""
        self.state: bytes | None = None
        """The newest intact control state. All events from ``base`` on follow it."""
        self.base = 0
        """Position of the file that opens with it."""
        self._find_state(self._numbers)
        self.id = self.id or new_id()
        to_read = [number for number in self._numbers if number >= file_at(self.base)]
        self.scanned_bytes, self.bytes_to_scan = 0, sum(self._size(number) for number in to_read)

    def _size(self, number: int) -> int:
        return path_of(self._directory, number).stat().st_size

    # Opening --------------------------------------------------------------------------------------------------

    def use_previous_state(self) -> None:
        """Replace ``state``, which turned out unusable, by the one before it. Blocking. Raises CorruptRecord if no
        other state exists and the log does not go back to its beginning."""
        self._find_state([number for number in self._numbers if number < file_at(self.base)])

    def _find_state(self, numbers: Sequence[int]) -> None:
        self.state, self.base = None, 0
        for file in log_files.newest_first(self._directory, numbers):
            if file.head is None:
                continue
            self.id = self.id or file.head.log
            if file.head.state is not None:
                self.state, self.base = file.head.state, start_of(file.number)
                return
        if self._numbers and self._numbers[0] > 1:
            raise CorruptRecord(
                f"The log in {self._directory} cannot be opened: the files before {self._numbers[0]:08d}.log were "
                "deleted, and no control state behind them can be read.",
                hint="Put a backup in its place (`headrace restore`). `headrace export` reads the remaining data.",
            )

    @property
    def initial_end(self) -> int:
        """Position behind all data in the directory when the log was opened."""
        return Location(self._numbers[-1], self._size(self._numbers[-1]), 0).position if self._numbers else 0

    def scan(self, since: int = 0) -> Iterator[LocatedFrame | LostRange]:
        """Everything in the log from a frame's position on, in order; a torn tail is cut at the end. Blocking: run it
        in a thread. ``scanned_bytes`` grows up to ``bytes_to_scan`` meanwhile. Raises SetupError."""
        start = Location.from_position(since, 0)
        numbers = [number for number in self._numbers if number >= start.file]
        # The states are large, and none is needed here.
        files = [file.without_state() for file in log_files.newest_first(self._directory, numbers)][::-1]
        skipped = start.offset if files and files[0].number == start.file else 0
        self.scanned_bytes, self.bytes_to_scan = 0, sum(file.size_bytes for file in files) - skipped
        yield from self._gaps_before(start.file)
        for file, following in zip(files, [*files[1:], None], strict=False):
            yield from self._scan_file(file, skipped)
            skipped = 0
            if following is not None and (missing := log_files.gap_after(file, following)) is not None:
                yield LostRange(file.path.name, missing.offset, missing.size_bytes, missing.problem)

    def _scan_file(self, file: LogFile, skipped: int) -> Iterator[LocatedFrame | LostRange]:
        current = _CurrentFile(file.number, self._clock_ms()) if file.number == self._numbers[-1] else None
        base = self.scanned_bytes - skipped
        # The last file may be appended to: its footer covers all of its frames, so all of them are read.
        for item in file.scan(0 if current is not None else skipped):
            self.scanned_bytes = base + item.offset
            if current is not None:
                current.add_read(item)
                if isinstance(item, Damage) and item.torn:
                    truncate(file.path, item.offset)
                    continue
            yield _located(file, item)
        self.scanned_bytes = base + file.size_bytes
        if current is not None:
            current.is_appendable = current.is_appendable and file.head is not None
            self._scanned_last = current

    def _gaps_before(self, file: int) -> Iterator[LostRange]:
        """Files that are missing among those that need not be read."""
        for number, following in pairwise(self._numbers):
            if number < file and (problem := log_files.missing_files(number, following)):
                yield LostRange(f"{number:08d}.log", self._size(number), 0, problem)

    def start(self, state: Callable[[], bytes | None], *, new_file: bool = False) -> None:
        """Make ready to append behind the scanned frames; in a new file if the last one cannot be appended to, or
        ``new_file`` is set. The scanned frames are made durable first, because later ones build on them. ``state``
        returns the control state there. Blocking. Raises StoreError."""
        last, self._scanned_last = self._scanned_last, None
        try:
            if last is not None and not last.offset and self._delete_empty(last.number):
                last = None
            self._previous_bytes = sum(map(self._size, self._numbers))
            if self._numbers:
                self._current = last or _CurrentFile(self._numbers[-1], self._clock_ms())
                headers, self._current.headers = bytes(self._current.headers), bytearray()
                self._require(self._writer.reopen(self._numbers[-1], self._previous_bytes, headers))
                self._current.offset = self._last_result.durable_bytes
                self._previous_bytes -= self._current.offset
            if last is None or not last.is_appendable:
                self._open_next(state())
            elif new_file or self.full:
                self.rotate(state())
            self._write_queue_blocking()
        except OSError as error:
            self.failure = error.strerror or str(error)
            raise self._store_error() from error

    def _delete_empty(self, number: int) -> bool:
        """Delete the last file if it was created and never written."""
        if self._size(number):
            return False
        path_of(self._directory, number).unlink()
        sync_directory(self._directory)
        self._numbers.pop()
        return True

    def _write_queue_blocking(self) -> None:
        self._require(self._writer.write_blocking(self._queue))
        self._durable = self._appended
        self._queue.clear()
        self._started = True

    def _require(self, result: WriteResult) -> None:
        """Store a result. Raises OSError or StoreError if it is a failure."""
        self._last_result = result
        if result.fatal:
            self.failure, self.stopped = result.fatal, True
            raise self._store_error()
        if result.failure is not None:
            raise OSError(result.failure.errno, result.failure.reason)

    # Writing --------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, including frames that are not written yet."""
        return self._previous_bytes + self._current.offset

    @property
    def opened_at_s(self) -> float:
        """Unix time in seconds at which the current file was opened."""
        return self._current.opened_ms / 1000

    @property
    def tail(self) -> int:
        """Position of the next frame."""
        return Location(self._current.number, self._current.offset, 0).position

    @property
    def full(self) -> bool:
        """True if the current file has reached its maximum size, its head not counted."""
        return self._current.offset - self._current.head_bytes >= self._file_bytes

    def append(self, kind: FrameType, payload: bytes) -> Location:
        """Queue a frame. It is on disk once a later ``synced`` returns; while the disk fails, it is kept. Raises
        StoreError once the log is stopped."""
        if self.stopped:
            raise self._store_error()
        frame = self._enqueue(kind, payload)
        self._unwritten[frame.file << OFFSET_BITS | frame.offset] = payload
        self._schedule_write()
        return Location(frame.file, frame.offset, len(payload))

    def rotate(self, state: bytes | None) -> None:
        """Seal the current file with its footer and open the next one with the control state behind everything that was
        appended. Not allowed while the disk fails."""
        self._enqueue(FrameType.FOOTER, _encoder.encode(self._current.footer.footer(self._clock_ms())))
        self._open_next(state)
        self.needs_state = False
        self._schedule_write()

    def _open_next(self, state: bytes | None) -> None:
        previous = self._current
        self._previous_bytes += previous.offset
        self._current = _CurrentFile(previous.number + 1, self._clock_ms())
        self._enqueue(FrameType.FILE_HEAD, self._head(self._current.number, previous.offset, state))

    def _head(self, number: int, before_bytes: int, state: bytes | None) -> bytes:
        head = FileHead(log=self.id, number=number, epoch=self._epoch, before_bytes=before_bytes, state=state)
        return _encoder.encode(head)

    def _enqueue(self, kind: FrameType, payload: bytes) -> PendingFrame:
        frame = self._current.add(kind, payload)
        self._appended += 1
        self._queue.append(frame)
        return frame

    def _schedule_write(self) -> None:
        """Write the queue after this turn of the event loop, with everything that is appended in it."""
        if self._writing or self.failure or not self._started:
            return
        self._writing = True
        asyncio.get_running_loop().call_soon(self._write_next_batch)

    def _write_next_batch(self) -> None:
        batch = [self._queue.popleft()]
        size_bytes = batch[0].size_bytes
        while self._queue and size_bytes + self._queue[0].size_bytes <= BATCH_BYTES:
            size_bytes += self._queue[0].size_bytes
            batch.append(self._queue.popleft())
        self._writer.write(batch, functools.partial(self._on_written, batch))

    def stop(self, problem: str) -> None:
        """Accept nothing more, and fail every waiter: decisions in memory and stored events differ from now on. The
        problem replaces a failure of the disk, and stays when the disk works again."""
        if not self.stopped:
            self.stopped, self.failure, self.phase = True, problem, "failed"
        self._wake_waiters()
        self._on_failure()

    async def synced(self) -> None:
        """Returns when everything appended so far is on disk. Raises StoreError if that cannot happen now."""
        if self.failure:
            raise self._store_error()
        if self._durable == self._appended:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._appended, waiter))
        await waiter

    def _on_written(self, batch: Sequence[PendingFrame], result: WriteResult) -> None:
        self._writing = False
        self._last_result = result
        if result.fatal:
            self.stop(result.fatal)
            return
        done = batch[: result.written]
        self._durable += len(done)
        if result.failure is not None:
            self._fail(result.failure, batch[result.written :])
        elif self._queue:
            self._writing = True
            self._write_next_batch()  # before anything else: the disk is idle
        self._wake_waiters()
        for frame in done:
            self._unwritten.pop(frame.file << OFFSET_BITS | frame.offset, None)
        if result.failure is None:
            self._on_sync(result.took_s, result.size_bytes)

    def _wake_waiters(self) -> None:
        while self._waiters and (self.failure or self._waiters[0][0] <= self._durable):
            upto, waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if upto <= self._durable:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._store_error())

    # A failing disk -------------------------------------------------------------------------------------------

    def _fail(self, failure: DiskFailure, unwritten: Sequence[PendingFrame]) -> None:
        """Keep the frames that are not on disk, fail all waiters, and schedule a retry."""
        # Footers and states belong to files that are not sealed, or not created, after a failure.
        kept = [frame for frame in (*unwritten, *self._queue) if frame.kind not in _FILE_FRAMES]
        self._appended -= len(unwritten) + len(self._queue) - len(kept)
        self._queue = deque(kept)
        self.needs_state |= failure.file_missing
        self.failure = failure.reason
        self.phase = _PHASES.get(failure.errno, self.failure.lower())
        self._retry_s = FIRST_RETRY_S
        self._schedule_retry()
        self._on_failure()

    def _schedule_retry(self) -> None:
        if self._closing:
            return
        self._retry_timer = asyncio.get_running_loop().call_later(self._retry_s, self.retry)
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def retry(self) -> None:
        """Write the queue to a new file, if the disk accepts it now. A timer calls this after a failure."""
        if self._retry_timer is None or self.stopped:
            return
        self._retry_timer.cancel()
        self._retry_timer = None
        file = _CurrentFile(self._last_result.number + 1, self._clock_ms())
        head = file.add(FrameType.FILE_HEAD, self._head(file.number, self._last_result.durable_bytes, None))
        moved = [file.add(frame.kind, frame.payload) for frame in self._queue]
        self._writing = True
        self._writer.write([head, *moved], functools.partial(self._on_retried, file, moved), new_file=True)

    def _on_retried(self, file: _CurrentFile, moved: list[PendingFrame], result: WriteResult) -> None:
        self._writing = False
        self._last_result = result
        if self._closing:
            return  # the next start finds the content of the file
        if result.fatal:
            self.stop(result.fatal)
            return
        if result.failure is not None:
            self._schedule_retry()
            return
        planned = list(self._queue)
        self._previous_bytes = self._last_result.total_bytes - self._removed_bytes - file.offset
        self._current = file
        late = [file.add(frame.kind, frame.payload) for frame in planned[len(moved) :]]  # appended meanwhile
        self._queue = deque(late)
        self._appended += 1  # the head
        self._durable = self._appended - len(late)
        self._unwritten = {_location(frame).position: bytes(frame.payload) for frame in late}
        self.files.forget(file.number)
        self.on_relocated(
            {_location(old).position: _location(new) for old, new in zip(planned, (*moved, *late), strict=True)}
        )
        if not self.stopped:
            self.failure = self.phase = ""
            self._on_recovery()
        if late:
            self._schedule_write()

    def _store_error(self) -> StoreError:
        if self.stopped:
            hint = "This request may not be stored. The orchestrator ends; try again once it has been started anew."
        else:
            hint = "This request may not be stored. The orchestrator continues once the disk accepts writes; try again."
        return StoreError(f"The log in {self._directory} cannot be written: {self.failure}.", hint=hint)

    # Old files ------------------------------------------------------------------------------------------------

    def oldest_for_restart(self) -> int:
        """Number of the oldest file that a start may need: the one with the last control state but one, because the
        last state may be damaged. Blocking."""
        numbers = log_files.numbers_in(self._directory)
        states = (file.number for file in log_files.newest_first(self._directory, numbers) if file.holds_state)
        return next(islice(states, 1, None), 0)

    async def remove(self, number: int) -> int:
        """Delete an old file that is not needed any more; returns its bytes. Raises StoreError."""
        try:
            removal = asyncio.create_task(asyncio.to_thread(self._remove, number))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            size_bytes = await asyncio.shield(removal)
        except DataDirectoryInUse as error:
            self.stop(error.detail.rstrip("."))
            raise self._store_error() from error
        except OSError as error:
            raise StoreError(
                f"An old file of the log cannot be deleted: {error.strerror or error}.",
                hint="Fix the cause; retention tries again.",
            ) from error
        self._previous_bytes -= size_bytes
        self._removed_bytes += size_bytes
        return size_bytes

    def _remove(self, number: int) -> int:
        self._require_owned()
        return self.files.remove(number)

    # Reading --------------------------------------------------------------------------------------------------

    def read(self, location: Location) -> bytes:
        """A payload, checked. Raises CorruptRecord that names file and offset. May be called from any thread."""
        unwritten = self._unwritten.get(location.position)
        if unwritten is not None:
            return unwritten
        return self.files.read(location.file, location.offset, location.length)

    async def close(self) -> None:
        """Write the queue, and close all files."""
        self._closing = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        try:
            if not self.failure:
                await self.synced()
        finally:
            # A thread cannot be stopped: no file may be deleted after this process gives the directory up.
            await asyncio.gather(*self._removals, return_exceptions=True)
            await self._writer.close()
            self.files.close()


def _located(file: LogFile, item: Frame | Damage) -> LocatedFrame | LostRange:
    if isinstance(item, Frame):
        return LocatedFrame(item, Location(file.number, item.offset, len(item.payload)))
    return LostRange(file.path.name, item.offset, item.size, item.problem)


def _location(frame: PendingFrame) -> Location:
    return Location(frame.file, frame.offset, len(frame.payload))

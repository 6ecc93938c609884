"""The log: the truth of a data directory. One writer, append-only files, group commit.

* Acknowledged means on disk: ``synced`` returns when all that was appended before the call is.
* One sync covers all frames that are waiting; the event loop never waits for the disk.
* A file that is full is sealed with its footer and never changed again; the next one opens with the live control state.
* A failed write or sync seals the file as far as it is durable; it is never tried on that file again, and every waiter
  is told.
* What was appended and not stored is kept, and goes to a new file as soon as the disk takes one.
* A torn tail is cut when the log is opened; damage in the middle is reported and costs that record only.
* Every read is checked against its checksum.
* A directory that holds something else than a log is refused, and the file is named.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
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
from headrace_orchestrator.buffer.data_directory import sync_directory
from headrace_orchestrator.buffer.log.file_writer import PendingFrame
from headrace_orchestrator.buffer.log.files import LocalLogFiles
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location
from headrace_orchestrator.buffer.log.writer_thread import DiskFailure, LogWriter, LogWriterThread, WriteResult
from headrace_orchestrator.buffer.storage_protocols import LogFiles

PROBE_FIRST_S, PROBE_LONGEST_S = 1.0, 8.0
"""How soon after a failure the disk is tried again; the wait doubles up to the second."""

TOGETHER_BYTES = 8 << 20
"""That the writer is given at once, where that is more than one frame and the disk does not refuse: the copy that a
writer outside takes holds the event loop for some two milliseconds."""

OnSync = Callable[[float, int], None]
"""Called after each group commit with its duration in seconds and its bytes."""


class LocatedFrame(NamedTuple):
    """A frame that was read, and where it is."""

    frame: Frame
    location: Location

    @property
    def end(self) -> int:
        """Position behind it."""
        return self.location.position + self.frame.size


class LostRange(NamedTuple):
    """Damage that was found in the log: so many bytes at an offset of a file."""

    file: str
    offset: int
    length: int
    problem: str


Relocations = Mapping[int, Location]
"""New places by old positions, of frames that had to be stored elsewhere than was meant."""


_OF_FILES = frozenset((FrameType.FILE_HEAD, FrameType.FOOTER))
_PHASES = {errno.ENOSPC: "disk full", errno.EDQUOT: "disk quota used up", errno.EROFS: "disk is read-only"}
_encoder = msgspec.msgpack.Encoder()


class _Filling:
    """The file that frames are placed in: where the next one goes, and what its footer will say."""

    def __init__(self, number: int, opened_ms: int) -> None:
        self.number = number
        self.tally = FooterBuilder(opened_ms)
        self.opened_ms = opened_ms
        self.offset = 0
        self.head_bytes = 0
        self.headers = bytearray()
        """Of the frames that were found."""
        self.intact = True
        """Whether it can be gone on with."""

    def place(self, kind: FrameType, payload: bytes | memoryview) -> PendingFrame:
        """A frame behind the last one."""
        frame = PendingFrame(self.number, self.offset, kind, payload, log_format.frame_bytes(kind, len(payload)))
        self.tally.place(kind, self.offset)
        self.offset += frame.size_bytes
        self.head_bytes = self.head_bytes or self.offset
        return frame

    def found(self, item: Frame | Damage) -> None:
        """What was read in it, in order."""
        if isinstance(item, Frame):
            header = log_format.header_of(item)
            self.tally.add(item.type, item.offset, header)
            self.headers += header
            self.offset = item.offset + item.size
            self.head_bytes = self.head_bytes or self.offset
            self.intact = self.intact and item.type is not FrameType.FOOTER
        elif not item.torn:
            self.intact = False


class Log:
    """The files of ``directory``. Use ``scan`` to its end once, then ``begin``, then append.

    ``require_owned`` raises DataDirectoryInUse once another process writes here. ``on_failure`` is called when the disk
    refuses, ``on_recovery`` when it takes again what waits. ``writing``: where the writer runs; a thread by default.
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
        writing: LogWriter | None = None,
    ) -> None:
        self.on_moved: Callable[[Relocations], None] = lambda moves: None
        """Called with what moved, before anything else is told of a recovery."""
        self.failure = ""
        """Why nothing can be stored now; empty when all is well."""
        self.phase = ""
        """The same in a word or two."""
        self.stopped = False
        """Whether only a restart helps."""
        self.incomplete = False
        """Whether what was stored was taken away, so that only a new control state tells all that was decided."""
        self.files: LogFiles = LocalLogFiles(directory)
        """What was written, by files."""
        self._directory = directory
        self._file_bytes = file_bytes
        self._epoch = epoch
        self._on_sync, self._on_failure, self._on_recovery = on_sync, on_failure, on_recovery
        self._clock_ms = clock_ms
        self._require_owned = require_owned
        self._writing = writing or LogWriterThread(directory, require_owned)
        self._writing.on_end = self.stop
        self._reached = WriteResult(0, 0, 0.0, 0, 0, 0)
        self._at = _Filling(0, 0)
        self._bytes_before = 0  # in files before the current one
        self._removed_bytes = 0  # of files that were deleted since the log was opened
        self._appended, self._durable = 0, 0  # counts of frames
        self._queue: deque[PendingFrame] = deque()
        self._busy = False  # the writer has frames, or is about to be given some
        self._begun = self._ended = False
        self._unwritten: dict[int, bytes] = {}
        self._removals: set[asyncio.Task[int]] = set()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._probe: asyncio.TimerHandle | None = None
        self._probe_s = PROBE_FIRST_S
        directory.mkdir(parents=True, exist_ok=True)
        self._numbers = log_files.numbers_in(directory)
        self._last: _Filling | None = None
        self.id = ""
        """Made once and kept in every file: tells what belongs to this log from what belongs to another."""
        self.state: bytes | None = None
        """The newest control state that is intact. Everything from ``base`` on comes on top of it."""
        self.base = 0
        """Position of the file that opens with it."""
        self._find_state(self._numbers)
        self.id = self.id or new_id()
        found = [
            path_of(directory, number).stat().st_size
            for number in self._numbers
            if number >= Location.at(self.base, 0).file
        ]
        self.scanned_bytes, self.found_bytes = 0, sum(found)

    # Opening --------------------------------------------------------------------------------------------------

    def drop_state(self) -> None:
        """The state cannot be taken: offer the one before it. Blocking. Raises CorruptRecord where there is none and
        the log does not go back to its beginning."""
        self._find_state([number for number in self._numbers if number < Location.at(self.base, 0).file])

    def _find_state(self, numbers: Sequence[int]) -> None:
        self.state, self.base = None, 0
        for file in log_files.newest_first(self._directory, numbers):
            if file.head is None:
                continue
            self.id = self.id or file.head.log
            if file.head.state is not None:
                self.state, self.base = file.head.state, Location(file.number, 0, 0).position
                return
        if self._numbers and self._numbers[0] > 1:
            raise CorruptRecord(
                f"The log in {self._directory} cannot be taken up: the files before {self._numbers[0]:08d}.log were "
                "deleted, and no control state behind them can be read.",
                hint="Put a backup in its place (`headrace restore`). `headrace export` reads what is still there.",
            )

    @property
    def found_end(self) -> int:
        """Position behind all that was found in the directory."""
        if not self._numbers:
            return 0
        return Location(self._numbers[-1], path_of(self._directory, self._numbers[-1]).stat().st_size, 0).position

    def scan(self, since: int = 0) -> Iterator[LocatedFrame | LostRange]:
        """Everything in the log from a frame's position on, in order; a torn tail is cut at the end. Blocking: run it
        in a thread. ``scanned_bytes`` grows up to ``found_bytes`` meanwhile. Raises SetupError."""
        start = Location.at(since, 0)
        wanted = [number for number in self._numbers if number >= start.file]
        # The states are large, and none is needed here.
        files = [file.without_state() for file in log_files.newest_first(self._directory, wanted)][::-1]
        skipped = start.offset if files and files[0].number == start.file else 0
        self.scanned_bytes, self.found_bytes = 0, sum(file.size_bytes for file in files) - skipped
        yield from self._gaps_before(start.file)
        for file, following in zip(files, [*files[1:], None], strict=False):
            last = _Filling(file.number, self._clock_ms()) if file.number == self._numbers[-1] else None
            # The last file may be gone on with: its footer will speak of all of its frames.
            start_at = 0 if last is not None else skipped
            base, skipped = self.scanned_bytes - skipped, 0
            for item in file.scan(start_at):
                self.scanned_bytes = base + item.offset
                if last is not None:
                    last.found(item)
                    if isinstance(item, Damage) and item.torn:
                        os.truncate(file.path, item.offset)
                        continue
                yield _placed(file, item)
            self.scanned_bytes = base + file.size_bytes
            if following is not None and (missing := log_files.gap_after(file, following)) is not None:
                yield LostRange(file.path.name, missing.offset, missing.size_bytes, missing.problem)
            if last is not None:
                last.intact = last.intact and file.head is not None
                self._last = last

    def _gaps_before(self, file: int) -> Iterator[LostRange]:
        """Files that are missing among those that need not be read."""
        for number, following in pairwise(self._numbers):
            if number < file and (problem := log_files.missing_files(number, following)):
                yield LostRange(f"{number:08d}.log", path_of(self._directory, number).stat().st_size, 0, problem)

    def begin(self, state: Callable[[], bytes | None], *, anew: bool = False) -> None:
        """Be open for appending behind what was scanned; in a new file where the last one cannot be gone on with, or
        ``anew`` says so. What was read is made durable first, for it will be built upon. ``state`` gives the control
        state there. Blocking. Raises StoreError."""
        last, self._last = self._last, None
        try:
            if last is not None and not last.offset and self._drop_empty(last.number):
                last = None
            self._bytes_before = sum(path_of(self._directory, number).stat().st_size for number in self._numbers)
            if self._numbers:
                self._at = last or _Filling(self._numbers[-1], self._clock_ms())
                headers, self._at.headers = bytes(self._at.headers), bytearray()
                self._require(self._writing.go_on(self._numbers[-1], self._bytes_before, headers))
                self._at.offset = self._reached.durable_bytes
                self._bytes_before -= self._at.offset
            if last is None or not last.intact:
                self._open_next(state())
            elif anew or self.full:
                self.rotate(state())
            self._write_queue()
        except OSError as error:
            self.failure = error.strerror or str(error)
            raise self._closed() from error

    def _drop_empty(self, number: int) -> bool:
        """A last file that was made and never written is as good as none."""
        path = path_of(self._directory, number)
        if path.stat().st_size:
            return False
        path.unlink()
        sync_directory(self._directory)
        self._numbers.pop()
        return True

    def _write_queue(self) -> None:
        """Write what waits now."""
        self._require(self._writing.write_now(self._queue))
        self._durable = self._appended
        self._queue.clear()
        self._begun = True

    def _require(self, outcome: WriteResult) -> None:
        """Take an outcome. Raises OSError or StoreError."""
        self._reached = outcome
        if outcome.end:
            self.failure, self.stopped = outcome.end, True
            raise self._closed()
        if outcome.refusal is not None:
            raise OSError(outcome.refusal.errno, outcome.refusal.reason)

    # Writing --------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, what is still to be written included."""
        return self._bytes_before + self._at.offset

    @property
    def opened_at_s(self) -> float:
        """When the file was opened that is written: Unix time in seconds."""
        return self._at.opened_ms / 1000

    @property
    def tail(self) -> int:
        """Position where the next frame will be."""
        return Location(self._at.number, self._at.offset, 0).position

    @property
    def full(self) -> bool:
        """Whether the file is as long as a file may be, its head not counted."""
        return self._at.offset - self._at.head_bytes >= self._file_bytes

    def append(self, kind: FrameType, payload: bytes) -> Location:
        """Queue a frame. It is on disk once a later ``synced`` returns; while the disk refuses, it is kept. Raises
        StoreError once the log is stopped."""
        if self.stopped:
            raise self._closed()
        frame = self._enqueue(kind, payload)
        self._unwritten[frame.file << OFFSET_BITS | frame.offset] = payload
        self._wake()
        return Location(frame.file, frame.offset, len(payload))

    def rotate(self, state: bytes | None) -> None:
        """Seal the file with its footer and go on in a new one, which opens with the control state as it is behind all
        that was appended. Not while the disk refuses."""
        self._enqueue(FrameType.FOOTER, _encoder.encode(self._at.tally.footer(self._clock_ms())))
        self._open_next(state)
        self.incomplete = False
        self._wake()

    def _open_next(self, state: bytes | None) -> None:
        before = self._at
        self._bytes_before += before.offset
        self._at = _Filling(before.number + 1, self._clock_ms())
        self._enqueue(FrameType.FILE_HEAD, self._head(self._at.number, before.offset, state))

    def _head(self, number: int, before_bytes: int, state: bytes | None) -> bytes:
        head = FileHead(log=self.id, number=number, epoch=self._epoch, before_bytes=before_bytes, state=state)
        return _encoder.encode(head)

    def _enqueue(self, kind: FrameType, payload: bytes) -> PendingFrame:
        frame = self._at.place(kind, payload)
        self._appended += 1
        self._queue.append(frame)
        return frame

    def _wake(self) -> None:
        """See that what waits is written, all that this turn of the event loop appends at once."""
        if self._busy or self.failure or not self._begun:
            return
        self._busy = True
        asyncio.get_running_loop().call_soon(self._write_waiting)

    def _write_waiting(self) -> None:
        batch = [self._queue.popleft()]
        size_bytes = batch[0].size_bytes
        while self._queue and size_bytes + self._queue[0].size_bytes <= TOGETHER_BYTES:
            size_bytes += self._queue[0].size_bytes
            batch.append(self._queue.popleft())
        self._writing.write(batch, functools.partial(self._written, batch))

    def stop(self, problem: str) -> None:
        """Take nothing more, and tell every waiter: what was decided and what is stored are not the same any more. That
        a disk refused before is not the reason any more: when it takes data again, this stays."""
        if not self.stopped:
            self.stopped, self.failure, self.phase = True, problem, "failed"
        self._tell_waiters()
        self._on_failure()

    async def synced(self) -> None:
        """Returns when everything appended so far is on disk. Raises StoreError if that is not so now."""
        if self.failure:
            raise self._closed()
        if self._durable == self._appended:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._appended, waiter))
        await waiter

    def _written(self, batch: Sequence[PendingFrame], outcome: WriteResult) -> None:
        self._busy = False
        self._reached = outcome
        if outcome.end:
            self.stop(outcome.end)
            return
        done = batch[: outcome.written]
        self._durable += len(done)
        if outcome.refusal is not None:
            self._fail(outcome.refusal, batch[outcome.written :])
        elif self._queue:
            self._busy = True
            self._write_waiting()  # first of all: the disk waits
        self._tell_waiters()
        for frame in done:
            self._unwritten.pop(frame.file << OFFSET_BITS | frame.offset, None)
        if outcome.refusal is None:
            self._on_sync(outcome.took_s, outcome.size_bytes)

    def _tell_waiters(self) -> None:
        while self._waiters and (self.failure or self._waiters[0][0] <= self._durable):
            upto, waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if upto <= self._durable:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._closed())

    # A disk that refuses --------------------------------------------------------------------------------------

    def _fail(self, refusal: DiskFailure, left: Sequence[PendingFrame]) -> None:
        """Keep what is not on disk, tell everybody, and try again later."""
        # A footer is of a file that will not be sealed, a state was to open one that was not made.
        kept = [frame for frame in (*left, *self._queue) if frame.kind not in _OF_FILES]
        self._appended -= len(left) + len(self._queue) - len(kept)
        self._queue = deque(kept)
        self.incomplete |= refusal.taken_away
        self.failure = refusal.reason
        self.phase = _PHASES.get(refusal.errno, self.failure.lower())
        self._probe_s = PROBE_FIRST_S
        self._probe_later()
        self._on_failure()

    def _probe_later(self) -> None:
        if self._ended:
            return
        self._probe = asyncio.get_running_loop().call_later(self._probe_s, self.try_again)
        self._probe_s = min(2 * self._probe_s, PROBE_LONGEST_S)

    def try_again(self) -> None:
        """Write what waits to a new file, if the disk takes it now. Happens in its own time after a failure."""
        if self._probe is None or self.stopped:
            return
        self._probe.cancel()
        self._probe = None
        file = _Filling(self._reached.number + 1, self._clock_ms())
        head = file.place(FrameType.FILE_HEAD, self._head(file.number, self._reached.durable_bytes, None))
        moved = [file.place(frame.kind, frame.payload) for frame in self._queue]
        self._busy = True
        self._writing.write([head, *moved], functools.partial(self._tried, file, moved), over=True)

    def _tried(self, file: _Filling, moved: list[PendingFrame], outcome: WriteResult) -> None:
        self._busy = False
        self._reached = outcome
        if self._ended:
            return  # what the file has, the next start finds
        if outcome.end:
            self.stop(outcome.end)
            return
        if outcome.refusal is not None:
            self._probe_later()
            return
        meant = list(self._queue)
        self._bytes_before = self._reached.total_bytes - self._removed_bytes - file.offset
        self._at = file
        late = [file.place(frame.kind, frame.payload) for frame in meant[len(moved) :]]  # appended meanwhile
        self._queue = deque(late)
        self._appended += 1  # the head
        self._durable = self._appended - len(late)
        self._unwritten = {_location(frame).position: bytes(frame.payload) for frame in late}
        self.files.forget(file.number)
        self.on_moved(
            {_location(old).position: _location(new) for old, new in zip(meant, (*moved, *late), strict=True)}
        )
        if not self.stopped:
            self.failure = self.phase = ""
            self._on_recovery()
        if late:
            self._wake()

    def _closed(self) -> StoreError:
        if self.stopped:
            hint = "This request may not be stored. Mend what failed, then restart the orchestrator and ask again."
        else:
            hint = "This request may not be stored. The orchestrator goes on once the disk takes data; ask again."
        return StoreError(f"The log in {self._directory} cannot be written: {self.failure}.", hint=hint)

    # Old files ------------------------------------------------------------------------------------------------

    def needed_by_a_start(self) -> int:
        """The oldest file that a start may need: that of the last control state but one, for the last may turn out
        damaged. Blocking."""
        numbers = log_files.numbers_in(self._directory)
        states = (file.number for file in log_files.newest_first(self._directory, numbers) if file.holds_state)
        return next(islice(states, 1, None), 0)

    async def remove(self, number: int) -> int:
        """Delete an old file whole; gives its bytes. Nothing in it may be needed any more. Raises StoreError."""
        try:
            removal = asyncio.create_task(asyncio.to_thread(self._remove, number))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            size_bytes = await asyncio.shield(removal)
        except DataDirectoryInUse as error:
            self.stop(error.detail.rstrip("."))
            raise self._closed() from error
        except OSError as error:
            raise StoreError(
                f"An old file of the log cannot be deleted: {error.strerror or error}.",
                hint="Mend what failed; retention tries again.",
            ) from error
        self._bytes_before -= size_bytes
        self._removed_bytes += size_bytes
        return size_bytes

    def _remove(self, number: int) -> int:
        self._require_owned()
        return self.files.remove(number)

    # Reading --------------------------------------------------------------------------------------------------

    def read(self, location: Location) -> bytes:
        """A payload, checked. Raises CorruptRecord that names file and offset. May be called from any thread."""
        waiting = self._unwritten.get(location.position)
        return waiting if waiting is not None else self.files.read(location.file, location.offset, location.length)

    async def close(self) -> None:
        """Write what waits, and close all files."""
        self._ended = True
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        try:
            if not self.failure:
                await self.synced()
        finally:
            # A thread cannot be stopped: nothing is deleted any more once this one gives the directory up.
            await asyncio.gather(*self._removals, return_exceptions=True)
            await self._writing.close()
            self.files.close()


def _placed(file: LogFile, item: Frame | Damage) -> LocatedFrame | LostRange:
    if isinstance(item, Frame):
        return LocatedFrame(item, Location(file.number, item.offset, len(item.payload)))
    return LostRange(file.path.name, item.offset, item.size, item.problem)


def _location(frame: PendingFrame) -> Location:
    return Location(frame.file, frame.offset, len(frame.payload))

"""Watches one program in a container: its output, its clock, its end.

* The clock is the supervisor's, starts with the program, and counts its work alone. When the time or the output is used
  up, the program is killed.
* Output is read to its end, even after a kill: a daemon whose reader stops does not end containers either. It is held
  in bounded memory.
* The call ends when the daemon ends the streams; a program's output never decides its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.host.work_time import WorkClock, look_at_threads
from headrace_sandbox.result import LimitName, Limits, Output
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, Streams

START_S = 60.0
"""Deadline for a program to start; on a quiet machine it takes some hundredths of a second."""

KILL_S = 8.0
"""Deadline for the end of a killed program, which takes several calls of the daemon."""

CPU_POLL_S = 0.1
"""Interval of the checks of the processor time, where it is limited."""

STDOUT, STDERR = 1, 2
HEADER_BYTES = 8


class StreamOutcome(NamedTuple):
    """The end of a program, as its streams show it. ``started``: True if it ever ran. ``limit``: the one that it was
    killed for. ``kills``: the number of kill calls that were needed."""

    started: bool
    limit: LimitName | None
    kills: int
    stdout: Output
    stderr: Output
    wall_s: float
    work_s: float


class StreamFrameReader:
    """Splits a connection into frames, and passes on the stream number and the bytes of each. Buffers only a header."""

    def __init__(self, on_data: Callable[[int, bytes], None]) -> None:
        self._on_data = on_data
        self._header = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the connection."""
        while data:
            if not self._left:
                need = HEADER_BYTES - len(self._header)
                self._header, data = self._header + data[:need], data[need:]
                if len(self._header) == HEADER_BYTES:
                    self._stream, self._left = self._header[0], int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            self._on_data(self._stream, part)


def ignore_failure(call: asyncio.Future[Any]) -> None:
    """Ignore the failure of a call that no caller awaits any more."""
    if not call.cancelled():
        call.exception()


class StreamWatcher:
    """Watches one program. ``kills``: calls that end it, tried in turn. ``cpu_s``: gives its processor time so far, or
    None where it is not counted; then all of its time counts. ``threads`` gives its threads.

    ``marked``: the shell that starts the program writes a byte to the output first, which marks the start. ``on_start``
    is called then.
    """

    def __init__(
        self,
        streams: Streams,
        limits: Limits,
        kills: Sequence[Callable[[], Awaitable[None]]],
        cpu_s: Callable[[], float | None],
        threads: Callable[[], Iterable[int]],
        *,
        marked: bool,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._streams = streams
        self._limits = limits
        self._kills = kills
        self._kill_calls = 0
        self._cpu_s = cpu_s
        self._threads = threads
        self._clock: WorkClock | None = None
        self._on_start = on_start
        self._started = asyncio.Event()
        self._captures = {STDOUT: Capture(limits.kept_bytes), STDERR: Capture(limits.kept_bytes)}
        self._limit: LimitName | None = None
        self._limit_hit = asyncio.Event()
        self._started_at = 0.0
        self._has_mark = not marked
        if not marked:
            self._start()

    def _start(self) -> None:
        """Start the clock."""
        self._started_at = time.monotonic()
        self._on_start()
        self._clock = WorkClock(lambda: look_at_threads(self._threads, self._cpu_s), self._limits)
        self._started.set()

    async def run(self, stdin: bytes) -> StreamOutcome:
        """Watch it to its end; closes the streams. Raises SandboxFailure ``unkillable``,
        ``program-starved`` or ``sandbox-not-made``."""
        reading = asyncio.create_task(self._read())
        tasks = [reading, asyncio.create_task(self._write(stdin)), asyncio.create_task(self._watch_cpu())]
        try:
            await self._until_end(reading)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._streams.end()
        wall_s = time.monotonic() - self._started_at if self._started.is_set() else 0.0
        work_s = 0.0 if self._clock is None else self._clock.end()
        stdout, stderr = (capture.output() for capture in self._captures.values())
        return StreamOutcome(self._started.is_set(), self._limit, self._kill_calls, stdout, stderr, wall_s, work_s)

    async def _until_end(self, reading: asyncio.Task[None]) -> None:
        failure = await self._until_due(reading)
        if reading.done():
            return
        if failure is None:
            self._stop("time")
        for kill in self._kills:
            self._kill_calls += 1
            kill_task = asyncio.ensure_future(kill())
            kill_task.add_done_callback(ignore_failure)
            await asyncio.wait([reading, kill_task], timeout=KILL_S)
            if reading.done():
                break
        else:
            raise SandboxFailure(
                f"The program was killed and did not end within {KILL_S:g} s.",
                hint="It is blocked in the kernel by a disk or a network file system, or the daemon is very busy.",
                kind="unkillable",
                retryable=True,
            )
        if failure is not None:
            raise failure

    async def _until_due(self, reading: asyncio.Task[None]) -> SandboxFailure | None:
        """Wait for the end of the program, or for its time or output to be used up. Returns the failure of ours for
        which it is to be killed."""
        started, limit_hit = asyncio.create_task(self._started.wait()), asyncio.create_task(self._limit_hit.wait())
        try:
            await asyncio.wait([reading, started], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if self._clock is not None:
                await self._until_any([reading, limit_hit], self._clock)
            elif not reading.done():
                return SandboxFailure(
                    f"The program did not start within {START_S:g} s.", kind="sandbox-not-made", retryable=True
                )
        except SandboxFailure as failure:
            return failure
        finally:
            started.cancel()
            limit_hit.cancel()
        return None

    async def _until_any(self, ends: list[asyncio.Task[Any]], clock: WorkClock) -> None:
        """Wait for one of these ends, or until the program's time is over."""
        while (look_in_s := clock.next_look_s()) is not None:
            done, _ = await asyncio.wait(ends, timeout=look_in_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            clock.add_look(look_in_s)

    def _stop(self, limit: LimitName) -> None:
        if self._limit is None:
            self._limit = limit
            self._limit_hit.set()

    async def _read(self) -> None:
        frames = StreamFrameReader(self._receive)
        with contextlib.suppress(ConnectionError):  # the daemon may end a stream in this way too
            while data := await self._streams.reader.read(READ_BYTES):
                frames.feed(data)

    def _receive(self, stream: int, data: bytes) -> None:
        # Data of the other stream may arrive before the mark.
        if stream == STDOUT and not self._has_mark:
            self._has_mark = True
            data = data[1:]
            self._start()
        self._captures[STDERR if stream == STDERR else STDOUT].feed(data)
        if sum(capture.total_bytes for capture in self._captures.values()) > self._limits.output_bytes:
            self._stop("output")

    async def _write(self, stdin: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the program reads no more
            await self._started.wait()
            self._streams.writer.write(stdin)
            await self._streams.writer.drain()
            self._streams.writer.write_eof()

    async def _watch_cpu(self) -> None:
        while self._limits.cpu_s is not None:
            await asyncio.sleep(CPU_POLL_S)
            if (self._cpu_s() or 0.0) >= self._limits.cpu_s:
                self._stop("cpu")

"""Watches one program in a container: its output, its clock, its end.

* The clock is the supervisor's, and starts when the program does. At its end, and at the bound of output, the program
  is killed.
* Output is read for as long as there is any, killed or not: a daemon whose reader stops does not end containers either.
  Bounded memory holds it.
* The call ends when the daemon ends the streams; what the program wrote is never read for a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.result import LimitName, Limits, Output
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, Streams

START_S = 60.0
"""For a program to start; on a quiet machine it takes some hundredths of a second."""

KILL_S = 8.0
"""For a killed program to be gone: that takes several calls of the daemon."""

CPU_LOOK_S = 0.1
"""Between looks at the processor time, where it is limited."""

STDOUT, STDERR = 1, 2
HEADER_BYTES = 8


class Seen(NamedTuple):
    """What was seen of a program. ``started``: whether it did. ``limit``: for which it was killed. ``kills``: how many
    of the ways to kill it were needed."""

    started: bool
    limit: LimitName | None
    kills: int
    stdout: Output
    stderr: Output
    wall_s: float


class Frames:
    """Takes the frames of a stream apart: of each, which of the two it belongs to, and its bytes. Holds no more than a
    header."""

    def __init__(self, take: Callable[[int, bytes], None]) -> None:
        self._take = take
        self._header = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> None:
        """More of the stream."""
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
            self._take(self._stream, part)


def dropped(call: asyncio.Future[Any]) -> None:
    """What a daemon says when nobody waits for it any more."""
    if not call.cancelled():
        call.exception()


class Watch:
    """One program. ``kills`` are the ways to end it, tried in turn; ``cpu_s`` is the processor time so far, None where
    nothing counts it.

    ``marked``: the program's start is told by a first byte on its output, written by what starts it. ``begun`` is
    called then.
    """

    def __init__(
        self,
        streams: Streams,
        limits: Limits,
        kills: Sequence[Callable[[], Awaitable[None]]],
        cpu_s: Callable[[], float | None],
        *,
        marked: bool,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._streams = streams
        self._limits = limits
        self._kills = kills
        self._killed = 0
        self._cpu_s = cpu_s
        self._begun = begun
        self._started = asyncio.Event()
        self._captures = {STDOUT: Capture(limits.kept_bytes), STDERR: Capture(limits.kept_bytes)}
        self._limit: LimitName | None = None
        self._over = asyncio.Event()
        self._begun_at = 0.0
        self._is_marked = not marked
        if not marked:
            self.begin()

    def begin(self) -> None:
        """The program starts now."""
        self._begun_at = time.monotonic()
        self._begun()
        self._started.set()

    async def run(self, stdin: bytes) -> Seen:
        """Watch it to its end; closes the streams. Raises SandboxFailure ``unkillable``."""
        reading = asyncio.create_task(self._read())
        tasks = [reading, asyncio.create_task(self._write(stdin)), asyncio.create_task(self._watch_cpu())]
        try:
            await self._until_end(reading)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._streams.end()
        wall_s = time.monotonic() - self._begun_at if self._started.is_set() else 0.0
        stdout, stderr = (capture.output() for capture in self._captures.values())
        return Seen(self._started.is_set(), self._limit, self._killed, stdout, stderr, wall_s)

    async def _until_end(self, reading: asyncio.Task[None]) -> None:
        started, over = asyncio.create_task(self._started.wait()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([reading, started], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if self._started.is_set():
                await asyncio.wait([reading, over], timeout=self._limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return
            self._stop("time")
        finally:
            started.cancel()
            over.cancel()
        for kill in self._kills:
            self._killed += 1
            killing = asyncio.ensure_future(kill())
            killing.add_done_callback(dropped)
            await asyncio.wait([reading, killing], timeout=KILL_S)
            if reading.done():
                return
        raise SandboxFailure(
            f"The program was killed and did not end within {KILL_S:g} s.",
            hint="It waits in the kernel for a disk or a network file system, or the daemon is very busy.",
            kind="unkillable",
            retryable=True,
        )

    def _stop(self, limit: LimitName) -> None:
        if self._limit is None:
            self._limit = limit
            self._over.set()

    async def _read(self) -> None:
        frames = Frames(self._take)
        with contextlib.suppress(ConnectionError):  # the daemon ends a stream so, too
            while data := await self._streams.reader.read(READ_BYTES):
                frames.feed(data)

    def _take(self, stream: int, data: bytes) -> None:
        # What came on the other stream may be here before the mark.
        if stream == STDOUT and not self._is_marked:
            self._is_marked = True
            data = data[1:]
            self.begin()
        self._captures[STDERR if stream == STDERR else STDOUT].feed(data)
        if sum(capture.total_bytes for capture in self._captures.values()) > self._limits.output_bytes:
            self._stop("output")

    async def _write(self, stdin: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it reads no more
            await self._started.wait()
            self._streams.writer.write(stdin)
            await self._streams.writer.drain()
            self._streams.writer.write_eof()

    async def _watch_cpu(self) -> None:
        while self._limits.cpu_s is not None:
            await asyncio.sleep(CPU_LOOK_S)
            if (self._cpu_s() or 0.0) >= self._limits.cpu_s:
                self._stop("cpu")

"""The log's writer in a process of its own: neither the event loop nor the disk waits for the other's interpreter.

* Frames go to it through shared memory, a copy of theirs; words through a socket.
* Of a long batch it writes one part while the next is copied.
* It ends with the orchestrator, however that ends, and nobody can take the data directory before it has.
* When it ends by itself the log is told why, and stops.
* Signals that end an orchestrator do not end it: what is still to be written comes to it.

``python -m`` of this module is that process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from mmap import mmap
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from headrace.errors import SetupError
from headrace.store.log_format import FrameType
from headrace.wire.alignment import padded
from headrace_orchestrator.buffer.data_directory import DataDirectory, Ownership
from headrace_orchestrator.buffer.log.file_writer import LogFileWriter, PendingFrame
from headrace_orchestrator.buffer.log.shared_memory import SharedMemory
from headrace_orchestrator.buffer.log.writer_thread import DiskFailure, ResultCallback, WriteResult, carry_out, write

COMMAND = (sys.executable, "-P", "-m", "headrace_orchestrator.buffer.log.writer_process")
"""Starts it, with the path of the data directory and its ``_Opening`` as JSON behind it."""

SUPPORTED = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")

_MESSAGE_BYTES = 64 << 10

FIRST_PART_BYTES, PART_BYTES = 64 << 10, 512 << 10
"""Of a long batch. The first part is small, for the other process to begin at once; each is twice as long as the one
before, up to a length from which on words cost nothing."""

_SENT_BYTES = 1 << 20
"""On its way at most: words of hundreds of parts, so that the event loop never waits to say one."""

_PLACE_BYTES = 64
"""That a frame's ``_Place`` takes at most."""

_NOT_FOR_IT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Opening(NamedTuple):
    """What it is started with. The path of the data directory comes by itself: it may be no text."""

    ownership: Ownership
    socket: int
    arena: int


class _Job(NamedTuple):
    """What it is to do, with what is in the arena."""

    what: Literal["go on", "write", "start over"]
    arena_bytes: int
    number: int = 0
    """Of the file to be gone on with."""
    total_bytes: int = 0
    frames: int = 0
    """That come in parts."""
    headers_bytes: int = 0
    """Of the headers, at the arena's beginning."""


class _Part(NamedTuple):
    """Frames of a job: where in the arena the list of ``_Place`` is."""

    at: int
    length: int


class _Place(NamedTuple):
    """A frame, and where in the arena its payload is."""

    file: int
    offset: int
    kind: FrameType
    at: int
    length: int
    size_bytes: int


_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(_Job)
_parts = msgspec.msgpack.Decoder(_Part)
_places = msgspec.msgpack.Decoder(list[_Place])
_outcomes = msgspec.msgpack.Decoder(WriteResult)


# Here -------------------------------------------------------------------------------------------------------------


class LogWriterProcess:
    """A writer of the log in a data directory."""

    def __init__(self, directory: DataDirectory) -> None:
        """Raises SetupError."""
        self.on_end: Callable[[str], None] = lambda reason: None
        self._told: ResultCallback | None = None
        self._reached = WriteResult(0, 0, 0.0, 0, 0, 0)
        self._is_watched = False
        try:
            with ExitStack() as made:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                made.callback(self._socket.close)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
                with theirs:
                    self._arena = SharedMemory.make()
                    made.callback(self._arena.close)
                    self._process = _start(directory, theirs.fileno(), self._arena.descriptor)
                made.pop_all()
        except OSError as error:
            raise SetupError(
                f"The process that writes the log cannot be started: {error.strerror or error}.",
                hint="It needs a free process, some descriptors and 30 MB of memory.",
            ) from error

    def go_on(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        def send(arena: mmap) -> None:
            arena[: len(headers)] = headers
            self._send(_Job("go on", self._arena.size_bytes, number, total_bytes, headers_bytes=len(headers)))

        return self._ask(len(headers), send)

    def write_now(self, batch: Sequence[PendingFrame]) -> WriteResult:
        return self._ask(_needed_bytes(batch), lambda arena: self._send_all("write", batch, arena))

    def watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._heard)

    def write(self, batch: Sequence[PendingFrame], told: ResultCallback, *, over: bool = False) -> None:
        self.watch()
        self._told = told
        what: Literal["write", "start over"] = "start over" if over else "write"
        became = self._hand_over(_needed_bytes(batch), lambda arena: self._send_all(what, batch, arena))
        if became is not None:
            self._tell(became)

    async def close(self) -> None:
        if self._is_watched:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        await asyncio.to_thread(self._process.wait)
        self._arena.close()

    def _ask(self, needed_bytes: int, send: Callable[[mmap], None]) -> WriteResult:
        """Have something done, and wait for it."""
        became = self._hand_over(needed_bytes, send)
        if became is None:
            try:
                answer = self._socket.recv(_MESSAGE_BYTES)
            except OSError:
                answer = b""
            became = _outcomes.decode(answer) if answer else self._ended()
        self._reached = became
        return became

    def _hand_over(self, needed_bytes: int, send: Callable[[mmap], None]) -> WriteResult | None:
        """Send something through the arena; what became of it where that is known at once."""
        try:
            arena = self._arena.fit(needed_bytes)
        except OSError as error:  # there is no memory for it
            return self._reached._replace(written=0, size_bytes=0, refusal=DiskFailure.of(error))
        try:
            send(arena)
        except OSError:
            return self._ended()
        except Exception as error:  # noqa: BLE001 - it is told, and ends all writing: a part may be on its way
            reason = f"its frames could not be handed over ({type(error).__name__}: {error})"
            return self._reached._replace(written=0, size_bytes=0, end=reason)
        return None

    def _send_all(self, what: Literal["write", "start over"], batch: Sequence[PendingFrame], arena: mmap) -> None:
        """Send the job, and its frames part by part."""
        self._send(_Job(what, self._arena.size_bytes, frames=len(batch)))
        places: list[_Place] = []
        begin = end = 0
        part_bytes = FIRST_PART_BYTES
        for number, frame in enumerate(batch, 1):
            length = len(frame.payload)
            arena[end : end + length] = frame.payload
            places.append(_Place(frame.file, frame.offset, frame.kind, end, length, frame.size_bytes))
            end = padded(end + length)
            if end - begin >= part_bytes or number == len(batch):
                index = _encoder.encode(places)
                arena[end : end + len(index)] = index
                self._send(_Part(end, len(index)))
                begin = end = padded(end + len(index))
                places, part_bytes = [], min(2 * part_bytes, PART_BYTES)

    def _send(self, message: _Job | _Part) -> None:
        self._socket.send(_encoder.encode(message))

    def _heard(self) -> None:
        try:
            answer = self._socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        self._tell(_outcomes.decode(answer) if answer else self._ended())

    def _tell(self, outcome: WriteResult) -> None:
        self._reached = outcome
        told, self._told = self._told, None
        if outcome.end:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if told is not None:
            told(outcome)
        elif outcome.end:
            self.on_end(outcome.end)

    def _ended(self) -> WriteResult:
        """It is gone: what of the last batch is on disk nobody knows."""
        try:
            reason = f"the process that writes the log ended ({_how(self._process.wait(1))})"
        except subprocess.TimeoutExpired:
            reason = "the process that writes the log cannot be reached"
        return self._reached._replace(written=0, size_bytes=0, end=reason)


def _needed_bytes(batch: Sequence[PendingFrame]) -> int:
    """Of the arena: for the payloads and, behind those of each part, their places."""
    return sum(padded(len(frame.payload)) + 2 * _PLACE_BYTES for frame in batch) + _PLACE_BYTES


def _how(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


def _start(directory: DataDirectory, socket: int, arena: int) -> subprocess.Popen[bytes]:
    path = directory.ownership.path
    opening = _Opening(directory.ownership._replace(path=""), socket, arena)
    # With a copy of the lock the directory is owned until this process ends too.
    handed = (socket, arena, directory.lock)
    # It inherits what is blocked here, for good: a signal to all processes may come before it could say a word.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
    try:
        return subprocess.Popen(
            [*COMMAND, path, msgspec.json.encode(opening).decode()], stdin=subprocess.DEVNULL, pass_fds=handed
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# There ------------------------------------------------------------------------------------------------------------


def serve(path: str, opening: str) -> None:
    """Write what comes until the orchestrator is gone."""
    given = msgspec.json.decode(opening, type=_Opening)
    arena = SharedMemory(given.arena)
    writer = LogFileWriter(Path(path) / "log", given.ownership._replace(path=path).require)
    # A reset: the orchestrator is gone, or has closed this, and never took the last answer.
    with socket.socket(fileno=given.socket) as orchestrator, suppress(ConnectionError):
        while job := orchestrator.recv(_MESSAGE_BYTES):
            outcome = _done(writer, arena, _jobs.decode(job), orchestrator)
            end = os.fsencode(outcome.end).decode(errors="replace")  # it may name a path that is no text
            orchestrator.send(_encoder.encode(outcome._replace(end=end)))


def _done(writer: LogFileWriter, arena: SharedMemory, job: _Job, orchestrator: socket.socket) -> WriteResult:
    memory = memoryview(arena.see(job.arena_bytes))
    if job.what == "go on":
        headers = memory[: job.headers_bytes]
        return carry_out(writer, 0, lambda: writer.go_on(job.number, job.total_bytes, headers))
    frames = _arriving(job, memory, orchestrator)
    outcome = write(writer, frames, job.frames, over=job.what == "start over")
    for _ in frames:
        pass  # of a batch that was refused the rest comes all the same
    return outcome


def _arriving(job: _Job, memory: memoryview, orchestrator: socket.socket) -> Iterator[PendingFrame]:
    left = job.frames
    while left:
        part = _parts.decode(orchestrator.recv(_MESSAGE_BYTES))
        places = _places.decode(memory[part.at : part.at + part.length])
        for file, offset, kind, at, length, size_bytes in places:
            yield PendingFrame(file, offset, kind, memory[at : at + length], size_bytes)
        left -= len(places)


if __name__ == "__main__":
    serve(*sys.argv[1:])
    os._exit(0)  # nothing is left to be done: whoever wants the directory waits for this

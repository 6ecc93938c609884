"""The log writer in a process of its own: event loop and disk never wait for the same interpreter lock.

* Frames are copied to the process through shared memory; short messages go through a socket.
* The process writes one part of a long batch while the next is copied.
* It ends with the orchestrator, however that ends, and no process can take the data directory before it has ended.
* If it ends while it has no batch, or during one, the log gets the reason and stops.
* Signals that end an orchestrator do not end it: it still has to write the frames that the orchestrator sends.

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
from headrace_orchestrator.buffer.log.writer import DiskFailure, ResultCallback, WriteResult, result_of, write_batch

COMMAND = (sys.executable, "-P", "-m", "headrace_orchestrator.buffer.log.writer_process")
"""The command that starts the process; its arguments are the path of the data directory, and ``_Setup`` as JSON."""

SUPPORTED = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")

_MESSAGE_BYTES = 64 << 10

FIRST_PART_BYTES, PART_BYTES = 64 << 10, 512 << 10
"""Sizes of the parts of a long batch. The first part is small, so that the process begins at once; each part is twice
as long as the one before, up to a size at which the cost of a message no longer matters."""

_SEND_BUFFER_BYTES = 1 << 20
"""Size of the socket's send buffer: room for the messages of hundreds of parts, so that a send never blocks the event
loop."""

_SHARED_FRAME_BYTES = 64
"""Upper bound of the size of an encoded ``_SharedFrame``."""

_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Setup(NamedTuple):
    """Arguments of the process. The path of the data directory is a separate argument: it may not be valid text."""

    ownership: Ownership
    socket: int
    memory: int


class _Request(NamedTuple):
    """A call of the ``LogFileWriter``, with its data in the shared memory."""

    call: Literal["reopen", "write", "write new file"]
    memory_bytes: int
    number: int = 0
    """Number of the file to reopen."""
    total_bytes: int = 0
    frames: int = 0
    """Number of frames to write; they follow in parts."""
    headers_bytes: int = 0
    """Bytes of the frame headers at the beginning of the memory."""


class _Part(NamedTuple):
    """Some frames of a request: offset and length of the encoded list of ``_SharedFrame``."""

    offset: int
    length: int


class _SharedFrame(NamedTuple):
    """A frame whose payload is in the shared memory, ``length`` bytes from ``start``."""

    file: int
    offset: int
    kind: FrameType
    start: int
    length: int
    size_bytes: int


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(_Request)
_part_decoder = msgspec.msgpack.Decoder(_Part)
_frames_decoder = msgspec.msgpack.Decoder(list[_SharedFrame])
_result_decoder = msgspec.msgpack.Decoder(WriteResult)


# In the orchestrator ------------------------------------------------------------------------------------------------


class LogWriterProcess:
    """A log writer in a child process."""

    def __init__(self, directory: DataDirectory) -> None:
        """Start the process. Raises SetupError."""
        self.on_end: Callable[[str], None] = lambda reason: None
        self._on_result: ResultCallback | None = None
        self._last = WriteResult(0, 0, 0.0, 0, 0, 0)
        self._is_watched = False
        try:
            with ExitStack() as cleanup:
                self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                cleanup.callback(self._socket.close)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
                with child_socket:
                    self._memory = SharedMemory.create()
                    cleanup.callback(self._memory.close)
                    self._process = _start(directory, child_socket.fileno(), self._memory.descriptor)
                cleanup.pop_all()
        except OSError as error:
            raise SetupError(
                f"The process that writes the log cannot be started: {error.strerror or error}.",
                hint="It needs a free process, some descriptors and 30 MB of memory.",
            ) from error

    def reopen(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        def send(memory: mmap) -> None:
            memory[: len(headers)] = headers
            self._send(_Request("reopen", self._memory.size_bytes, number, total_bytes, headers_bytes=len(headers)))

        return self._call(len(headers), send)

    def write_blocking(self, batch: Sequence[PendingFrame]) -> WriteResult:
        return self._call(_needed_bytes(batch), lambda memory: self._send_batch("write", batch, memory))

    def watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)

    def write(self, batch: Sequence[PendingFrame], on_result: ResultCallback, *, new_file: bool = False) -> None:
        self.watch()
        self._on_result = on_result
        call: Literal["write", "write new file"] = "write new file" if new_file else "write"
        result = self._try_send(_needed_bytes(batch), lambda memory: self._send_batch(call, batch, memory))
        if result is not None:
            self._deliver(result)

    async def close(self) -> None:
        if self._is_watched:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        await asyncio.to_thread(self._process.wait)
        self._memory.close()

    def _call(self, needed_bytes: int, send: Callable[[mmap], None]) -> WriteResult:
        """Send a request and wait for its result."""
        result = self._try_send(needed_bytes, send)
        if result is None:
            try:
                reply = self._socket.recv(_MESSAGE_BYTES)
            except OSError:
                reply = b""
            result = _result_decoder.decode(reply) if reply else self._process_ended()
        self._last = result
        return result

    def _try_send(self, needed_bytes: int, send: Callable[[mmap], None]) -> WriteResult | None:
        """Send a request through the shared memory; returns its result if it failed before the process had it."""
        try:
            memory = self._memory.resize(needed_bytes)
        except OSError as error:  # not enough memory
            return self._last._replace(written=0, size_bytes=0, failure=DiskFailure.of(error))
        try:
            send(memory)
        except OSError:
            return self._process_ended()
        except Exception as error:  # noqa: BLE001 - it is part of the result; fatal, for some parts may have been sent
            reason = f"its frames could not be handed over ({type(error).__name__}: {error})"
            return self._last._replace(written=0, size_bytes=0, fatal=reason)
        return None

    def _send_batch(
        self, call: Literal["write", "write new file"], batch: Sequence[PendingFrame], memory: mmap
    ) -> None:
        """Send a request, and its frames part by part."""
        self._send(_Request(call, self._memory.size_bytes, frames=len(batch)))
        shared: list[_SharedFrame] = []
        start = end = 0
        part_bytes = FIRST_PART_BYTES
        for number, frame in enumerate(batch, 1):
            length = len(frame.payload)
            memory[end : end + length] = frame.payload
            shared.append(_SharedFrame(frame.file, frame.offset, frame.kind, end, length, frame.size_bytes))
            end = padded(end + length)
            if end - start >= part_bytes or number == len(batch):
                index = _encoder.encode(shared)
                memory[end : end + len(index)] = index
                self._send(_Part(end, len(index)))
                start = end = padded(end + len(index))
                shared, part_bytes = [], min(2 * part_bytes, PART_BYTES)

    def _send(self, message: _Request | _Part) -> None:
        self._socket.send(_encoder.encode(message))

    def _on_readable(self) -> None:
        try:
            reply = self._socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        self._deliver(_result_decoder.decode(reply) if reply else self._process_ended())

    def _deliver(self, result: WriteResult) -> None:
        self._last = result
        on_result, self._on_result = self._on_result, None
        if result.fatal:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if on_result is not None:
            on_result(result)
        elif result.fatal:
            self.on_end(result.fatal)

    def _process_ended(self) -> WriteResult:
        """The result of a batch whose process has ended: it is unknown which of its frames are on disk."""
        try:
            reason = f"the process that writes the log ended ({_exit_text(self._process.wait(1))})"
        except subprocess.TimeoutExpired:
            reason = "the process that writes the log cannot be reached"
        return self._last._replace(written=0, size_bytes=0, fatal=reason)


def _needed_bytes(batch: Sequence[PendingFrame]) -> int:
    """Bytes of shared memory for the payloads and, behind those of each part, their list."""
    return sum(padded(len(frame.payload)) + 2 * _SHARED_FRAME_BYTES for frame in batch) + _SHARED_FRAME_BYTES


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


def _start(directory: DataDirectory, socket: int, memory: int) -> subprocess.Popen[bytes]:
    path = directory.ownership.path
    setup = _Setup(directory.ownership._replace(path=""), socket, memory)
    # The copy of the lock keeps the directory owned until this process has ended too.
    inherited = (socket, memory, directory.lock)
    # The child inherits the blocked signals: one to the whole group may arrive before the child could block it itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        return subprocess.Popen(
            [*COMMAND, path, msgspec.json.encode(setup).decode()], stdin=subprocess.DEVNULL, pass_fds=inherited
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the process -----------------------------------------------------------------------------------------------------


def serve(path: str, setup_json: str) -> None:
    """Carry out requests until the orchestrator has ended."""
    setup = msgspec.json.decode(setup_json, type=_Setup)
    memory = SharedMemory(setup.memory)
    writer = LogFileWriter(Path(path) / "log", setup.ownership._replace(path=path).require)
    # ConnectionError: the orchestrator ended, or closed the socket, without reading the last result.
    with socket.socket(fileno=setup.socket) as orchestrator, suppress(ConnectionError):
        while request := orchestrator.recv(_MESSAGE_BYTES):
            result = _carry_out(writer, memory, _request_decoder.decode(request), orchestrator)
            fatal = os.fsencode(result.fatal).decode(errors="replace")  # it may name a path that is not valid text
            orchestrator.send(_encoder.encode(result._replace(fatal=fatal)))


def _carry_out(
    writer: LogFileWriter, shared_memory: SharedMemory, request: _Request, orchestrator: socket.socket
) -> WriteResult:
    memory = memoryview(shared_memory.map(request.memory_bytes))
    if request.call == "reopen":
        headers = memory[: request.headers_bytes]
        return result_of(writer, 0, lambda: writer.reopen(request.number, request.total_bytes, headers))
    frames = _receive_frames(request, memory, orchestrator)
    result = write_batch(writer, frames, request.frames, new_file=request.call == "write new file")
    for _ in frames:
        pass  # the orchestrator sends the rest of a batch that failed too
    return result


def _receive_frames(request: _Request, memory: memoryview, orchestrator: socket.socket) -> Iterator[PendingFrame]:
    left = request.frames
    while left:
        part = _part_decoder.decode(orchestrator.recv(_MESSAGE_BYTES))
        frames = _frames_decoder.decode(memory[part.offset : part.offset + part.length])
        for file, offset, kind, start, length, size_bytes in frames:
            yield PendingFrame(file, offset, kind, memory[start : start + length], size_bytes)
        left -= len(frames)


if __name__ == "__main__":
    serve(*sys.argv[1:])
    os._exit(0)  # nothing is left to do, and the next owner of the directory waits for this exit

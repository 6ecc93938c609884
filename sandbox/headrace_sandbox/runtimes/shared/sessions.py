"""The supervisor's side of a session: a cell's output, clock and end, for every runtime.

* The clock is the supervisor's, and counts the cell's work alone. A cell that exceeds its time or its output is
  stopped; the session goes on.
* The host's frames are bounded and validated; a host that does not answer is ended, and recreated.
* A session that lost its state says so, in the result of the cell that caused it, or of the next one.
* One cell runs at a time; others wait for it.

The host is ``guest/session_host.py``; frames are described there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.host.cgroups.cgroup import usage_between
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.work_time import Look, WorkClock, look_at_threads
from headrace_sandbox.result import ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import bad_command
from headrace_sandbox.runtimes.shared.exec_result import limit_hit

FRAME_HEADER = struct.Struct("=cI")

MOST_FRAME_BYTES = 1 << 20
"""Largest frame from the host, which sends 64 KiB at most."""

MOST_CELL_BYTES = 1 << 20
"""Largest text of a cell."""

MOST_STATUS = 255

READ_BYTES = 256 << 10

STOP_S = 5.0
"""Deadline for a host to stop a cell: it takes 1.6 s, more where processors are scarce."""


class SessionHost(Protocol):
    """The host of a session: the process inside that runs its cells."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> None:
        """Kill it, and all that it started; nothing of it is left. Raises SandboxFailure."""
        ...


class SessionBackend(NamedTuple):
    """A runtime's part of a session. ``start_host`` makes a host. ``usage`` gives the sandbox's usage so far,
    ``threads`` its threads, as far as they can be seen. ``cpus``: the processors of its template.
    ``why_gone`` gives the reason that a host ended by itself, if a program caused it, and raises SandboxFailure if none
    could."""

    start_host: Callable[[], Awaitable[SessionHost]]
    usage: Callable[[], Usage]
    why_gone: Callable[[], Awaitable[str]]
    isolation: Isolation
    threads: Callable[[], Iterable[int]]
    cpus: float


class HostedSession:
    """A session whose cells run in a host process inside the sandbox."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = backend
        self._host: SessionHost | None = None
        self._frames = _FrameBuffer()
        self._lock = asyncio.Lock()
        self._is_in_cell = False
        self._is_closed = False

    async def start(self) -> None:
        """Make the host now, before the first cell. Raises SandboxFailure."""
        await self._live_host()

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        """Run a cell. Only the limits ``wall_s``, ``output_bytes`` and ``kept_bytes`` apply. Raises SandboxFailure.
        Cancelling the call ends the session's host; the next cell gets a new one."""
        text = _encode_cell(cell)
        if len(text) > MOST_CELL_BYTES:
            raise SandboxFailure(
                f"The cell has {len(text)} bytes; the limit is {MOST_CELL_BYTES}.",
                hint="Write it to a file of the sandbox, and run that.",
                kind="request-too-large",
                retryable=False,
            )
        called_at = time.monotonic()
        async with self._lock:
            queue_s = time.monotonic() - called_at
            return await self._run(text, limits, queue_s)

    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does."""
        if self._host is not None and self._is_in_cell:
            _send(self._host, b"i", b"")

    async def close(self) -> None:
        """End it, and everything that it started."""
        self._is_closed = True
        await self._end_host()

    async def _run(self, text: bytes, limits: Limits, queue_s: float) -> ExecResult:
        started_at = time.monotonic()
        host = await self._live_host()
        before = self._backend.usage()
        output = _CellOutput(limits)
        start_s = time.monotonic() - started_at
        started_at = time.monotonic()
        clock = WorkClock(self._look_since(before), msgspec.structs.replace(limits, cpus=self._backend.cpus))
        self._is_in_cell = True
        try:
            _send(host, b"c", text)
            end, limit = await self._until_end(host, output, limits, clock)
        except BaseException:
            await self._end_host()  # the caller no longer waits for the cell
            raise
        finally:
            self._is_in_cell = False
        wall_s, work_s = time.monotonic() - started_at, clock.end()
        usage = msgspec.structs.replace(usage_between(before, self._backend.usage()), disk_full=end.disk_full)
        is_killed = limit is not None
        if limit is None and end.status != 0:
            limit = limit_hit(usage)
        return ExecResult(
            exit_code=None if is_killed or end.status is None or end.status < 0 else end.status,
            signal=-end.status if not is_killed and end.status is not None and end.status < 0 else None,
            stdout=output.stdout.output(),
            stderr=output.stderr.output(),
            limit=limit,
            wall_s=wall_s,
            work_s=work_s,
            start_s=start_s,
            queue_s=queue_s,
            lost=end.lost,
            usage=usage,
            isolation=self._backend.isolation,
        )

    async def _until_end(
        self, host: SessionHost, output: _CellOutput, limits: Limits, clock: WorkClock
    ) -> tuple[_CellEnd, LimitName | None]:
        limit: LimitName = "time"
        reading = asyncio.create_task(self._read_until_end(host, output, limits.output_bytes))
        try:
            if await _ends_in_time(reading, clock):
                return reading.result(), None
        except _OutputLimitError:
            limit = "output"
        _send(host, b"s", b"")
        try:
            async with timeout(STOP_S):
                return await self._read_until_end(host, output, None), limit
        except TimeoutError:
            await self._end_host()
            return _CellEnd(None, "The session could not be stopped, and was ended."), limit

    def _look_since(self, before: Usage) -> Look:
        usage, threads = self._backend.usage, self._backend.threads
        return lambda: look_at_threads(threads, lambda: usage_between(before, usage()).cpu_s)

    async def _read_until_end(self, host: SessionHost, output: _CellOutput, output_bytes: int | None) -> _CellEnd:
        while True:
            frame = self._frames.next()
            if frame is None:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = await host.reader.read(READ_BYTES)
                if not data:
                    reason = await self._backend.why_gone()
                    await self._end_host()
                    return _CellEnd(None, reason)
                self._frames.feed(data)
                continue
            kind, payload = frame
            if kind == b"x":
                return _parse_cell_end(payload)
            output.feed(kind, payload)
            if output_bytes is not None and output.total_bytes > output_bytes:
                raise _OutputLimitError

    async def _live_host(self) -> SessionHost:
        if self._is_closed:
            raise _session_closed()
        if self._host is None:
            host = await self._backend.start_host()
            if self._is_closed:  # meanwhile
                await run_to_completion(host.end())
                raise _session_closed()
            self._host, self._frames = host, _FrameBuffer()
        return self._host

    async def _end_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await run_to_completion(host.end())


def _encode_cell(cell: str) -> bytes:
    try:
        return cell.encode()
    except UnicodeEncodeError as error:
        raise bad_command("The cell is not Unicode: it has half a character in it.") from error


async def _ends_in_time(reading: asyncio.Task[_CellEnd], clock: WorkClock) -> bool:
    """True if the task ends before the time of the cell is over, after which it is cancelled."""
    try:
        while not reading.done() and (look_in_s := clock.next_look_s()) is not None:
            await asyncio.wait([reading], timeout=look_in_s)
            if not reading.done():
                clock.add_look(look_in_s)
    finally:
        reading.cancel()
        await asyncio.wait([reading])  # the next reader must not meet it
    return not reading.cancelled()


def _session_closed() -> SandboxFailure:
    return SandboxFailure("The session was closed.", kind="closed", retryable=False)


class _OutputLimitError(Exception):
    """The cell wrote more than its limit."""


class _CellEnd(NamedTuple):
    status: int | None
    lost: str | None
    disk_full: bool = False


class _CellOutput:
    """The kept output of a cell."""

    def __init__(self, limits: Limits) -> None:
        self.stdout, self.stderr = Capture(limits.kept_bytes), Capture(limits.kept_bytes)

    def feed(self, kind: bytes, data: bytes) -> None:
        (self.stdout if kind == b"o" else self.stderr).feed(data)

    @property
    def total_bytes(self) -> int:
        return self.stdout.total_bytes + self.stderr.total_bytes


class _FrameBuffer:
    """Splits a host's data into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[bytes, bytes] | None:
        """The next frame, or None until it is complete. Raises SandboxFailure ``bad-frame``."""
        if len(self._data) < FRAME_HEADER.size:
            return None
        kind, size = FRAME_HEADER.unpack_from(self._data)
        if kind not in (b"o", b"e", b"x") or size > MOST_FRAME_BYTES:
            raise bad_frame()
        if len(self._data) < FRAME_HEADER.size + size:
            return None
        payload = bytes(self._data[FRAME_HEADER.size : FRAME_HEADER.size + size])
        del self._data[: FRAME_HEADER.size + size]
        return kind, payload


def bad_frame() -> SandboxFailure:
    """The failure of a host that breaks the protocol."""
    return SandboxFailure("The session's host sent an unreadable frame.", kind="bad-frame", retryable=True)


def _parse_cell_end(payload: bytes) -> _CellEnd:
    try:
        end = json.loads(payload)
        status = int(end["status"])
        lost = str(end["lost"])[:500] or None
        return _CellEnd(status if abs(status) <= MOST_STATUS else None, lost, bool(end["disk_full"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise bad_frame() from error


def _send(host: SessionHost, kind: bytes, payload: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended, which the next read notices
        host.writer.write(FRAME_HEADER.pack(kind, len(payload)) + payload)

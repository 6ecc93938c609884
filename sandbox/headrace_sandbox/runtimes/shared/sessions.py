"""Sessions from outside: a cell's output, clock and end, whatever runtime the session's host runs in.

* The clock is the supervisor's. A cell that runs into its time, or writes too much, is stopped; the session goes on.
* What the host says is bounded before it is believed; one that does not answer is ended, and made anew.
* A session that lost what it knew says so, in the result of the cell that brought it about, or of the next one.
* One cell runs at a time; others wait for it.

The host is ``guest/session_host.py``; frames are described there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.host.cgroups import since
from headrace_sandbox.host.watch import to_the_end
from headrace_sandbox.result import ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import bad_command
from headrace_sandbox.runtimes.shared.outcome import limit_hit

HEAD = struct.Struct("=cI")

MOST_FRAME_BYTES = 1 << 20
"""Of a frame of the host, which sends 64 KiB at most."""

MOST_CELL_BYTES = 1 << 20
"""Of a cell's text."""

MOST_STATUS = 255

READ_BYTES = 256 << 10

STOP_S = 5.0
"""For a host to stop a cell: it takes 1.6 s, more where processors are scarce."""


class Host(Protocol):
    """The host of a session, as it is reached from outside."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def end(self) -> None:
        """Kill it, and all that it started; nothing of it is left. Raises SandboxFailure."""
        ...


class Parts(NamedTuple):
    """What a runtime gives. ``start`` makes a host. ``usage`` is what the sandbox used so far. ``why_gone`` says why a
    host is gone that nobody ended: what the program did; it raises SandboxFailure where only we can have done it."""

    start: Callable[[], Awaitable[Host]]
    usage: Callable[[], Usage]
    why_gone: Callable[[], Awaitable[str]]
    isolation: Isolation


class HostedSession:
    """A session."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._host: Host | None = None
        self._frames = _Frames()
        self._one = asyncio.Lock()
        self._is_in_cell = False
        self._is_closed = False

    async def start(self) -> None:
        """Make the host now, and not for the first cell. Raises SandboxFailure."""
        await self._running()

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        """Run a cell. Of the limits ``wall_s``, ``output_bytes`` and ``kept_bytes`` hold. Raises SandboxFailure.
        Cancelling the call ends the session's host; the next cell finds a new one."""
        text = _text_of(cell)
        if len(text) > MOST_CELL_BYTES:
            raise SandboxFailure(
                f"The cell has {len(text)} bytes, and a session takes {MOST_CELL_BYTES}.",
                hint="Write it to a file of the sandbox, and run that.",
                kind="request-too-large",
                retryable=False,
            )
        asked_at = time.monotonic()
        async with self._one:
            queue_s = time.monotonic() - asked_at
            return await self._run(text, limits, queue_s)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does."""
        if self._host is not None and self._is_in_cell:
            _send(self._host, b"i", b"")

    async def close(self) -> None:
        """End it, and everything that it started."""
        self._is_closed = True
        await self._end_host()

    async def _run(self, text: bytes, limits: Limits, queue_s: float) -> ExecResult:
        begun_at = time.monotonic()
        host = await self._running()
        before = self._parts.usage()
        heard = _Heard(limits)
        start_s = time.monotonic() - begun_at
        begun_at = time.monotonic()
        self._is_in_cell = True
        try:
            _send(host, b"c", text)
            end, limit = await self._until_end(host, heard, limits)
        except BaseException:
            await self._end_host()  # nobody waits for the cell any more
            raise
        finally:
            self._is_in_cell = False
        wall_s = time.monotonic() - begun_at
        usage = msgspec.structs.replace(since(before, self._parts.usage()), disk_full=end.disk_full)
        is_killed = limit is not None
        if limit is None and end.status != 0:
            limit = limit_hit(usage)
        return ExecResult(
            exit_code=None if is_killed or end.status is None or end.status < 0 else end.status,
            signal=-end.status if not is_killed and end.status is not None and end.status < 0 else None,
            stdout=heard.stdout.output(),
            stderr=heard.stderr.output(),
            limit=limit,
            wall_s=wall_s,
            start_s=start_s,
            queue_s=queue_s,
            lost=end.lost,
            usage=usage,
            isolation=self._parts.isolation,
        )

    async def _until_end(self, host: Host, heard: _Heard, limits: Limits) -> tuple[_End, LimitName | None]:
        limit: LimitName
        try:
            async with timeout(limits.wall_s):
                return await self._listen(host, heard, limits.output_bytes), None
        except TimeoutError:
            limit = "time"
        except _TooMuchError:
            limit = "output"
        _send(host, b"s", b"")
        try:
            async with timeout(STOP_S):
                return await self._listen(host, heard, None), limit
        except TimeoutError:
            await self._end_host()
            return _End(None, "The session could not be stopped, and was ended."), limit

    async def _listen(self, host: Host, heard: _Heard, output_bytes: int | None) -> _End:
        while True:
            frame = self._frames.next()
            if frame is None:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = await host.reader.read(READ_BYTES)
                if not data:
                    why = await self._parts.why_gone()
                    await self._end_host()
                    return _End(None, why)
                self._frames.feed(data)
                continue
            kind, payload = frame
            if kind == b"x":
                return _end_of(payload)
            heard.feed(kind, payload)
            if output_bytes is not None and heard.total_bytes > output_bytes:
                raise _TooMuchError

    async def _running(self) -> Host:
        if self._is_closed:
            raise _closed()
        if self._host is None:
            host = await self._parts.start()
            if self._is_closed:  # meanwhile
                await to_the_end(host.end())
                raise _closed()
            self._host, self._frames = host, _Frames()
        return self._host

    async def _end_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await to_the_end(host.end())


def _text_of(cell: str) -> bytes:
    try:
        return cell.encode()
    except UnicodeEncodeError as error:
        raise bad_command("The cell is no Unicode: there is half a character in it.") from error


def _closed() -> SandboxFailure:
    return SandboxFailure("The session was closed.", kind="closed", retryable=False)


class _TooMuchError(Exception):
    """The cell wrote more than it may."""


class _End(NamedTuple):
    status: int | None
    lost: str | None
    disk_full: bool = False


class _Heard:
    """What a cell wrote."""

    def __init__(self, limits: Limits) -> None:
        self.stdout, self.stderr = Capture(limits.kept_bytes), Capture(limits.kept_bytes)

    def feed(self, kind: bytes, data: bytes) -> None:
        (self.stdout if kind == b"o" else self.stderr).feed(data)

    @property
    def total_bytes(self) -> int:
        return self.stdout.total_bytes + self.stderr.total_bytes


class _Frames:
    """Cuts what a host sends into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[bytes, bytes] | None:
        """The next frame, if it is there whole. Raises SandboxFailure ``bad-frame``."""
        if len(self._data) < HEAD.size:
            return None
        kind, size = HEAD.unpack_from(self._data)
        if kind not in (b"o", b"e", b"x") or size > MOST_FRAME_BYTES:
            raise bad_frame()
        if len(self._data) < HEAD.size + size:
            return None
        payload = bytes(self._data[HEAD.size : HEAD.size + size])
        del self._data[: HEAD.size + size]
        return kind, payload


def bad_frame() -> SandboxFailure:
    """The failure of a host that does not talk as it should."""
    return SandboxFailure("The session's host said what cannot be read.", kind="bad-frame", retryable=True)


def _end_of(payload: bytes) -> _End:
    try:
        said = json.loads(payload)
        status = int(said["status"])
        lost = str(said["lost"])[:500] or None
        return _End(status if abs(status) <= MOST_STATUS else None, lost, bool(said["disk_full"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise bad_frame() from error


def _send(host: Host, kind: bytes, payload: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it is gone, and will be found so
        host.writer.write(HEAD.pack(kind, len(payload)) + payload)

"""The HTTP server and protocol of the services: uvicorn's, with everything that is private to uvicorn.

* A uvicorn that this file is not written for is refused at the start, with what to install.
* A client whose request does not begin, or does not end, is disconnected (``headrace.server.request_timeouts``).
* Callbacks that an application adds to a request's scope are called when the client disconnects.
* A small request that the application takes directly needs no task, and is answered in one write.
* A body may be given as several buffers, which nobody joins.
* What is on its way to a client of this machine fits a processor's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.errors import SetupError
from headrace.server.request_timeouts import RequestTimeouts, RequestTimer

UVICORN_RANGE = ">=0.53,<0.55"
"""Versions of uvicorn that this file is written for. Before 0.53 an answer does not say that its connection ends."""

DISCONNECT_CALLBACKS = "headrace.disconnect_callbacks"
"""Extension of a request's scope: a list of callbacks. A task that waits for ``http.disconnect`` would cost each
request more."""

SMALL_BYTES = HIGH_WATER_LIMIT
"""The longest body of a request that is taken directly: of a longer one uvicorn reads no more than this before an
application asks for it."""

SEND_BUFFER_BYTES = 512 << 10
"""Sent and not yet read, on one machine: what is read again while a cache still holds it is read in two thirds of the
time. Between machines the kernel decides, by how far they are apart."""

Respond = Callable[[int, bytes, bytes], None]
"""Takes status, header lines and body of an answer. To be called once."""

BodyHandler = Callable[[bytes, Respond], None]
"""Takes a request's body and what sends its answer, now or later. Raises nothing."""


def require_supported_uvicorn() -> None:
    """Raises SetupError for a uvicorn outside of ``UVICORN_RANGE``."""
    floor, ceiling = map(_numbers, re.findall(r"[\d.]+", UVICORN_RANGE))
    if not floor <= _numbers(uvicorn.__version__) < ceiling:
        raise SetupError(
            f"uvicorn {uvicorn.__version__} is installed; this version of Headrace runs with uvicorn{UVICORN_RANGE}.",
            hint=f"pip install 'uvicorn{UVICORN_RANGE}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


class HttpServer(uvicorn.Server):
    """Leaves signals to the owner of the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class BodyParts:
    """A part of an answer's body, as several buffers. uvicorn asks for its length, and hands it to the transport."""

    __slots__ = ("buffers", "size_bytes")

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.buffers = buffers
        self.size_bytes = sum(map(len, buffers))

    def __len__(self) -> int:
        return self.size_bytes


class _Transport:
    """A transport that takes ``BodyParts``."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes | BodyParts) -> None:
        if isinstance(data, BodyParts):
            self._transport.writelines(data.buffers)
        else:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Direct(NamedTuple):
    """A request whose body is not whole yet."""

    cycle: RequestResponseCycle
    app: Any
    handler: BodyHandler


class HttpProtocol(HttpToolsProtocol):
    """One connection. The application may have ``direct(scope)``, which gives the handler of a request that needs no
    task, and has a body of at most ``SMALL_BYTES`` (no HEAD request); or None."""

    def __init__(self, timeouts: RequestTimeouts, *, config: uvicorn.Config, **given: Any) -> None:
        super().__init__(config=config, **given)
        self._timeouts = timeouts
        self._choose_direct: Callable[[Any], BodyHandler | None] = getattr(config.app, "direct", lambda scope: None)
        self._direct: _Direct | None = None
        self._disconnect_callbacks: list[Callable[[], object]] = []
        self._extensions: Any = {DISCONNECT_CALLBACKS: self._disconnect_callbacks}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _bound_send_buffer(transport)
        super().connection_made(cast(asyncio.Transport, _Transport(cast(asyncio.Transport, transport))))
        self._timer = RequestTimer(self._timeouts, self.loop.call_later, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.stop()
        direct, self._direct = self._direct, None
        if direct is not None:  # it is treated as any other whose client left
            super()._start_asgi_task(direct.cycle, direct.app)
        for call in self._disconnect_callbacks:
            call()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._timer.bytes_received(is_idle=self.cycle is None or self.cycle.response_complete)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._timer.request_begun()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._timer.request_complete()
        self._take_if_whole()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        handler = None if cycle.waiting_for_100_continue else self._choose_direct(cycle.scope)
        if handler is None:
            super()._start_asgi_task(cycle, app)
            return
        self._direct = _Direct(cycle, app, handler)
        self._take_if_whole()

    def _take_if_whole(self) -> None:
        direct = self._direct
        if direct is not None and not direct.cycle.more_body:
            self._direct = None
            body, direct.cycle.body = bytes(direct.cycle.body), bytearray()
            direct.handler(body, functools.partial(_respond, direct.cycle))


def _bound_send_buffer(transport: asyncio.BaseTransport) -> None:
    ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    if ours and theirs and ours[0] == theirs[0]:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _respond(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    """Answer a request that has no task; later, if its client does not read what is on its way."""
    if cycle.flow.write_paused and not cycle.disconnected:
        cycle.late = asyncio.create_task(_respond_later(cycle, status, head, body))  # type: ignore[attr-defined]
        return
    if not (cycle.disconnected or cycle.transport.is_closing()):
        _write(cycle, status, head, body)
    cycle.on_response = _nothing  # else it keeps its connection, which keeps it


async def _respond_later(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    await cycle.flow.drain()
    _respond(cycle, status, head, body)


def _nothing() -> None:
    """The response callback of a request that is over."""


def _write(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    lines = [STATUS_LINE[status]]
    for name, value in cycle.default_headers:
        lines += name, b": ", value, b"\r\n"
    close = b"" if cycle.keep_alive else b"connection: close\r\n"
    cycle.transport.write(b"".join([*lines, head, close, b"\r\n", body]))
    cycle.response_started = cycle.response_complete = True
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()

"""The HTTP server and protocol of the services, based on uvicorn's. No other module uses uvicorn's private names.

* An unsupported version of uvicorn is refused, with the versions to install.
* A client whose request does not begin or end in time is disconnected (``headrace.server.request_timeouts``).
* Callbacks that an application adds to a request's scope are called when the client disconnects.
* A small request that the application handles directly needs no task, and its response is sent in one write.
* A body may consist of several buffers, which are sent without joining them.
* Unread data for a client on this machine fits into a processor's cache.
* The head of a request, its trailers and the number of requests that wait on a connection are bounded.
* Trailers are dropped: a request has the headers that it began with.
* A request that cannot be parsed, or has too large a head, is answered with a problem body. It is not logged, because
  anyone could fill the log.
* Connections are limited; the application tells on which ones a token was accepted (``connection_limit``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.errors import InvalidRequest, RequestError, RequestHeadTooLarge, SetupError
from headrace.server.connection_limit import ConnectionLimit
from headrace.server.request_timeouts import RequestTimeouts, RequestTimer
from headrace.wire.messages import PROBLEM_MEDIA_TYPE

UVICORN_RANGE = ">=0.53,<0.55"
"""Versions of uvicorn that this module supports. Before 0.53 a response does not announce the end of its connection."""

DISCONNECT_CALLBACKS = "headrace.disconnect_callbacks"
"""Extension of a request's scope: a list of callbacks. Waiting for ``http.disconnect`` would take a task for each
request."""

TOKEN_ACCEPTED = "headrace.token_accepted"
"""Extension of a request's scope: a function to call when the request's token was accepted for a route that needs one,
or is not needed by this service. The connection is then among the last to be closed at the limit."""

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a request line with all headers, and of trailers. Clients send less than 1 KiB, proxies add as much."""

MAX_HEADERS = 128
"""Most headers of a request."""

MAX_WAITING_REQUESTS = 16
"""Most requests of a connection that wait for the response of an earlier one; the clients of Headrace send none so."""

SMALL_BYTES = HIGH_WATER_LIMIT
"""Longest body of a request that is handled directly: uvicorn reads at most this much before an application receives
the body."""

SEND_BUFFER_BYTES = 512 << 10
"""Most bytes sent and not yet read, on one machine: reading them from a cache takes two thirds of the time. Between
machines the kernel chooses the size by the round-trip time."""

_log = logging.getLogger("uvicorn.error.connection")
_log.setLevel(logging.ERROR)  # uvicorn warns of every request that is not valid

Respond = Callable[[int, bytes, bytes], None]
"""Sends a response: its status, header lines and body. It is called once."""

BodyHandler = Callable[[bytes, Respond], None]
"""Handles a request: its body, and the function that sends the response, now or later. It does not raise."""


def require_supported_uvicorn() -> None:
    """Raise SetupError for a version of uvicorn outside of ``UVICORN_RANGE``."""
    floor, ceiling = map(_numbers, re.findall(r"[\d.]+", UVICORN_RANGE))
    if not floor <= _numbers(uvicorn.__version__) < ceiling:
        raise SetupError(
            f"uvicorn {uvicorn.__version__} is installed; this version of Headrace runs with uvicorn{UVICORN_RANGE}.",
            hint=f"pip install 'uvicorn{UVICORN_RANGE}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


class HttpServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the owner of the event loop has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class BodyParts:
    """A part of a response's body as several buffers. uvicorn uses only its length, and passes it to the transport."""

    __slots__ = ("buffers", "size_bytes")

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.buffers = buffers
        self.size_bytes = sum(map(len, buffers))

    def __len__(self) -> int:
        return self.size_bytes


class _Transport:
    """A transport that also writes ``BodyParts``."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes | BodyParts) -> None:
        if self._transport.is_closing():  # uvloop raises; uvicorn learns of the end a little later
            return
        if isinstance(data, BodyParts):
            self._transport.writelines(data.buffers)
        else:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _DirectRequest(NamedTuple):
    """A request to be handled directly, whose body is incomplete."""

    cycle: RequestResponseCycle
    app: Any
    handler: BodyHandler


class HttpProtocol(HttpToolsProtocol):
    """A connection.

    The application may have a method ``direct(scope)``. It returns the handler of a request that needs no task and has
    a body of at most ``SMALL_BYTES``, or None for any other; it never returns a handler for a HEAD request.
    """

    def __init__(
        self, limit: ConnectionLimit, timeouts: RequestTimeouts, *, config: uvicorn.Config, **options: Any
    ) -> None:
        super().__init__(config=config, **options)
        self.logger = _log
        self._limit = limit
        self._timeouts = timeouts
        self._unparsed_bytes = 0
        """Bytes received since the last part of a body or the last complete request: those of a head or of trailers."""
        self._refusal: RequestError | None = None
        self._direct_handler: Callable[[Any], BodyHandler | None] = getattr(config.app, "direct", lambda scope: None)
        self._direct: _DirectRequest | None = None
        self._disconnect_callbacks: list[Callable[[], object]] = []
        self._extensions: Any = {
            DISCONNECT_CALLBACKS: self._disconnect_callbacks,
            TOKEN_ACCEPTED: functools.partial(limit.accept, self),
        }

    @property
    def waits_for_client(self) -> bool:
        """True unless the application handles a complete request: a client that sends only a part of one, or does not
        read its response, is waited for."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete or self.flow.write_paused

    @property
    def idle_since(self) -> float | None:
        """Order in which connections between two requests became idle; None during a request."""
        return self.timeout_keep_alive_task.when() if self.timeout_keep_alive_task is not None else None

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _bound_send_buffer(transport)
        super().connection_made(cast(asyncio.Transport, _Transport(cast(asyncio.Transport, transport))))
        self._timer = RequestTimer(self._timeouts, self.loop.call_later, self.transport.abort)
        if not self._limit.open(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.stop()
        self._limit.remove(self)
        self._extensions[TOKEN_ACCEPTED] = _do_nothing  # the other one refers to this connection, which refers to it
        direct, self._direct = self._direct, None
        if direct is not None:  # handled like any request whose client disconnected
            super()._start_asgi_task(direct.cycle, direct.app)
        for call in self._disconnect_callbacks:
            call()

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and self._refusal is None:
            self._refusal = _too_large_head(f"is larger than {MAX_HEAD_BYTES} bytes")
            self.send_400_response("")
        self._timer.bytes_received(is_idle=self.cycle is None or self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Answer that the data received is not a request, or is too large, and close the connection. uvicorn calls this
        when its parser fails, also because a callback raised."""
        error = self._refusal = self._refusal or InvalidRequest(msg, hint="Send an HTTP/1.1 request.")
        if self.cycle is None or self.cycle.response_complete:  # else it would be read as the response to another one
            body = msgspec.json.encode(error.problem())
            head = f"content-type: {PROBLEM_MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(b"".join([STATUS_LINE[error.status], head.encode(), body]))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._timer.request_begun()

    def on_headers_complete(self) -> None:
        if self._unparsed_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS or self.pipeline:
            self._require_bounds()
        super().on_headers_complete()
        self._unparsed_bytes = 0
        self.headers = []  # the parser adds trailers to it

    def _require_bounds(self) -> None:
        """Raise RequestHeadTooLarge for a head that is too large, or if too many requests wait: this stops the parser.
        The bytes received may include a body, so those of the head are counted."""
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_large_head(f"is larger than {MAX_HEAD_BYTES} bytes")
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = _too_large_head(f"has more than {MAX_HEADERS} headers")
        elif len(self.pipeline) >= MAX_WAITING_REQUESTS:
            self._refusal = InvalidRequest(f"More than {MAX_WAITING_REQUESTS} requests wait on one connection.")
        if self._refusal is not None:
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self.headers = []
        super().on_message_complete()
        self._timer.request_complete()
        self._handle_if_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        handler = None if cycle.waiting_for_100_continue else self._direct_handler(cycle.scope)
        if handler is None:
            super()._start_asgi_task(cycle, app)
            return
        self._direct = _DirectRequest(cycle, app, handler)
        self._handle_if_complete()

    def _handle_if_complete(self) -> None:
        direct = self._direct
        if direct is not None and not direct.cycle.more_body:
            self._direct = None
            body, direct.cycle.body = bytes(direct.cycle.body), bytearray()
            direct.handler(body, functools.partial(_respond, direct.cycle))


def _too_large_head(problem: str) -> RequestHeadTooLarge:
    return RequestHeadTooLarge(f"The head of the request {problem}.", hint="Send fewer or shorter headers.")


def _bound_send_buffer(transport: asyncio.BaseTransport) -> None:
    ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    if ours and theirs and ours[0] == theirs[0]:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _respond(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    """Respond to a request that has no task; later, if its client does not read the data sent before."""
    if cycle.flow.write_paused and not cycle.disconnected:
        cycle.late = asyncio.create_task(_respond_later(cycle, status, head, body))  # type: ignore[attr-defined]
        return
    if not (cycle.disconnected or cycle.transport.is_closing()):
        _write(cycle, status, head, body)
    cycle.on_response = _do_nothing  # it would keep a reference to the connection, which refers to the cycle


async def _respond_later(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    await cycle.flow.drain()
    _respond(cycle, status, head, body)


def _do_nothing() -> None:
    """The response callback of a request that has ended."""


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

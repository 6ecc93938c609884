"""An asynchronous HTTP/1.1 client for one server, with persistent connections.

* A connection is kept between requests. One that the server closed, or that was idle for long, is not reused.
* ``Unreachable`` means that nothing was sent; ``NoResponse`` that the request may have arrived, without a complete
  response; ``IncompleteResponse`` that a response began.
* A response that is too long is not read to its end.
* A cancelled request closes its connection, and so does one that times out.
* A response with a length may arrive in any pieces; one without a length ends with its connection.
* A name and a password in the address are sent with every request that has no other authorization.
* Proxy settings of the environment are ignored, and redirects are not followed.

Every sandbox execution, every policy turn and every message from a worker to the orchestrator is sent by this client. A
general-purpose client costs more than all the rest of such a call, so this one does only what these calls need, with
the HTTP parser that servers use too. It needs ``httptools``, which the extras of these packages install.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from typing import NamedTuple, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httptools

from headrace.common.timeouts import timeout

CONNECT_TIMEOUT_S = 5.0
"""Longest time to open a connection."""

KEEP_ALIVE_S = 30.0
"""Longest idle time after which a connection is reused; services of this project keep theirs longer. If a server closes
one just as a request is sent, that request raises ``NoResponse``."""

MAX_RESPONSE_BYTES = 1 << 30
"""Longest response, which bounds the memory that an endless one takes."""


class Unreachable(Exception):
    """The connection failed, and the request was not sent."""


class NoResponse(Exception):
    """The request may have arrived, but has no complete response."""


class IncompleteResponse(NoResponse):
    """A response began, but is not complete."""


class ClientResponse(NamedTuple):
    """A complete response."""

    status: int
    body: bytes


class HttpClient:
    """The connections to one server, used in one event loop.

    ``headers`` are sent with every request. At most ``max_response_bytes`` of a response are read, headers included.
    """

    def __init__(self, address: str, headers: dict[str, str], max_response_bytes: int = MAX_RESPONSE_BYTES) -> None:
        """``address``: ``unix:///path``, or ``http://host:port`` (or ``https``), optionally with a path prefix.

        Raises ValueError for another address, or for a header of several lines.
        """
        parts = urlsplit(address)
        self._socket, self._host, self._port, prefix = "", parts.hostname or "", parts.port or 0, ""
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            self._socket = parts.path
        elif parts.scheme in ("http", "https") and parts.hostname:
            self._tls = ssl.create_default_context() if parts.scheme == "https" else None
            self._port = self._port or (443 if self._tls else 80)
            prefix = quote(parts.path.rstrip("/"), safe="/%")
        else:
            raise ValueError(f"{address!r} is not the address of a server")
        self._prefix = prefix.encode("ascii")
        self._headers = _header_lines(
            {"Host": parts.netloc.rpartition("@")[2] or "localhost", **_basic_authorization(parts), **headers}
        )
        self._max_response_bytes = max_response_bytes
        self._idle: list[_HttpConnection] = []
        self._all: set[_HttpConnection] = set()

    async def request(
        self, method: str, path: str, body: bytes, timeout_s: float | None, headers: dict[str, str] | None = None
    ) -> ClientResponse:
        """Send a request and wait for the response, at most ``timeout_s`` seconds; None: without a limit.

        ``headers``: additional headers of this request. Raises Unreachable, NoResponse, and ValueError for a header of
        several lines.
        """
        extra_headers = _header_lines(headers) if headers else b""
        connection = self._take() or await self._connect()
        head = b"%b %b%b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
        try:
            response = await connection.send(
                head % (method.encode(), self._prefix, path.encode(), self._headers, extra_headers, len(body)),
                body,
                timeout_s,
            )
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()
        return response

    async def close(self) -> None:
        """Close all connections, and wait until they are closed."""
        closing = list(self._all)
        self.abort()
        for connection in closing:
            await connection.closed

    def abort(self) -> None:
        """Close all connections, including those in use: their requests raise ``NoResponse``."""
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()

    def _take(self) -> _HttpConnection | None:
        """The most recently used idle connection, if any is usable."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with timeout(CONNECT_TIMEOUT_S):
                if self._socket:
                    _, connection = await loop.create_unix_connection(self._new_connection, self._socket)
                else:
                    _, connection = await loop.create_connection(
                        self._new_connection, self._host, self._port, ssl=self._tls
                    )
        except TimeoutError as error:
            raise Unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise Unreachable(str(error)) from error
        return connection

    def _new_connection(self) -> _HttpConnection:
        connection = _HttpConnection(self._all, self._max_response_bytes)
        connection.closed.add_done_callback(lambda _: self._forget(connection))
        return connection

    def _forget(self, connection: _HttpConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _HttpConnection(asyncio.Protocol):
    """A connection, for one request at a time.

    It adds itself to ``all_`` once it is connected: an event loop creates the protocol before it knows that the
    connection was refused.
    """

    def __init__(self, all_: set[_HttpConnection], max_response_bytes: int) -> None:
        self._all = all_
        self._max_response_bytes = max_response_bytes
        self._size_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._response: asyncio.Future[ClientResponse] | None = None
        self._parts: list[bytes] = []
        self._has_length = self._ends_with_connection = False
        self._used_at = 0.0
        self.is_reusable = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_usable(self) -> bool:
        """True if the connection may be used: it is not known to be closed, and was not idle for long."""
        return not self._transport.is_closing() and time.monotonic() - self._used_at < KEEP_ALIVE_S

    async def send(self, head: bytes, body: bytes, timeout_s: float | None) -> ClientResponse:
        """Send a request and wait for its response. Raises NoResponse."""
        self.is_reusable = False
        self._size_bytes = 0
        self._response = self._loop.create_future()
        timer = timeout_s and self._loop.call_later(timeout_s, self._fail, "the server was silent for too long")
        self._transport.writelines((head, body))
        try:
            return await self._response
        finally:
            if timer:
                timer.cancel()
            self._response = None

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _fail(self, problem: str) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(IncompleteResponse(problem) if self._size_bytes else NoResponse(problem))

    # Called by the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._size_bytes += len(data)
        if self._size_bytes > self._max_response_bytes:
            self._fail(f"the response is longer than {self._max_response_bytes} bytes")
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the response is not HTTP: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._ends_with_connection and error is None:
            self.on_message_complete()
        self._fail(f"the connection broke: {error}" if error else "the server closed the connection")
        if not self.closed.done():
            self.closed.set_result(None)

    # Called by the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._parts, self._has_length = [], False
        if self._response is None or self._response.done():  # a response without a request
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_length

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        status = self._parser.get_status_code()
        if status < 200 or self._response is None or self._response.done():  # an interim response, or none is expected
            return
        # The unsent rest of a request that got an early response would be sent before the next request.
        self.is_reusable = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()
        self._used_at = time.monotonic()
        self._response.set_result(ClientResponse(status, b"".join(self._parts)))


def _basic_authorization(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    name = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"}


def _header_lines(headers: dict[str, str]) -> bytes:
    for name, value in headers.items():
        if not value.isprintable():
            raise ValueError(f"the header {name} has several lines")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")

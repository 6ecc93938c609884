"""Requests to one HTTP server, over connections that are kept.

* A connection is kept between requests. One that the server closed, or that was idle for long, is not used again.
* ``Unreachable`` says that nothing was sent; ``NoResponse`` that the request may have arrived, and has no whole answer;
  ``IncompleteResponse`` that one began.
* An answer that is too long is not read to its end.
* Whoever is cancelled hangs up; so does who waits for too long.
* An answer with an end of its own may come in any pieces; one without ends with its connection.
* A name and a password in an address go with every request that has no other authorization.
* Proxy settings of the environment are ignored, and redirects not followed.

Every program that runs through a sandbox service, every turn of a policy and all that workers say to the orchestrator
passes here, and a client that can speak to any server costs more than all the rest of its way: hence one that can do
what these need, with the parser of HTTP that servers have too. It needs ``httptools``, which their extras bring.
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
"""To open a connection."""

KEEP_ALIVE_S = 30.0
"""Idle connections are used again within this time, shorter than services of this project keep theirs. Where a server
closes one just as a request goes out, that request is ``NoResponse``."""

MAX_RESPONSE_BYTES = 1 << 30
"""Of an answer. What never ends would take all memory."""


class Unreachable(Exception):
    """There is no connection: the request did not reach the server."""


class NoResponse(Exception):
    """No whole answer came; whether the request arrived is not known."""


class IncompleteResponse(NoResponse):
    """An answer began, and is not whole."""


class ClientResponse(NamedTuple):
    """What a server said."""

    status: int
    body: bytes


class HttpClient:
    """All connections to one server. ``headers`` go with every request. No more than ``most_bytes`` of an answer, its
    head included, are read. Used in one event loop."""

    def __init__(self, address: str, headers: dict[str, str], most_bytes: int = MAX_RESPONSE_BYTES) -> None:
        """``address``: ``unix:///path``, or ``http://host:port`` (or ``https``), with a path before all others where
        there is one. Raises ValueError if it is neither, or a header has no single line."""
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
            raise ValueError(f"{address!r} is no address of a server")
        self._prefix = prefix.encode("ascii")
        self._headers = _lines({"Host": parts.netloc.rpartition("@")[2] or "localhost", **_basic(parts), **headers})
        self._most_bytes = most_bytes
        self._idle: list[_HttpConnection] = []
        self._all: set[_HttpConnection] = set()

    async def request(
        self, method: str, path: str, body: bytes, timeout_s: float | None, headers: dict[str, str] | None = None
    ) -> ClientResponse:
        """Send it, and wait for the answer, so many seconds at most; None: as long as it takes. ``headers``: of this
        request alone. Raises Unreachable, NoResponse; ValueError for a header that has no single line."""
        more = _lines(headers) if headers else b""
        connection = self._take() or await self._connect()
        head = b"%b %b%b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
        try:
            answer = await connection.ask(
                head % (method.encode(), self._prefix, path.encode(), self._headers, more, len(body)), body, timeout_s
            )
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    async def close(self) -> None:
        """Close all, and wait until they are closed."""
        closing = list(self._all)
        self.hang_up()
        for connection in closing:
            await connection.gone

    def hang_up(self) -> None:
        """Close all, those in use too: whoever waits on one gets ``NoResponse``."""
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()

    def _take(self) -> _HttpConnection | None:
        """The connection that was used last."""
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
                    _, connection = await loop.create_unix_connection(self._made, self._socket)
                else:
                    _, connection = await loop.create_connection(self._made, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise Unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise Unreachable(str(error)) from error
        return connection

    def _made(self) -> _HttpConnection:
        connection = _HttpConnection(self._all, self._most_bytes)
        connection.gone.add_done_callback(lambda _: self._forget(connection))
        return connection

    def _forget(self, connection: _HttpConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _HttpConnection(asyncio.Protocol):
    """One request at a time. ``all_``: where it enters itself once it is one. An event loop may have it made before it
    knows that nobody listens."""

    def __init__(self, all_: set[_HttpConnection], most_bytes: int) -> None:
        self._all = all_
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[ClientResponse] | None = None
        self._parts: list[bytes] = []
        self._has_length = self._ends_with_connection = False
        self._used_at = 0.0
        self.is_reusable = False
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_usable(self) -> bool:
        """Whether the server has it open still, as far as is known."""
        return not self._transport.is_closing() and time.monotonic() - self._used_at < KEEP_ALIVE_S

    async def ask(self, head: bytes, body: bytes, timeout_s: float | None) -> ClientResponse:
        """Send a request, and wait for its answer. Raises NoResponse."""
        self.is_reusable = False
        self._size_bytes = 0
        self._answer = self._loop.create_future()
        timer = timeout_s and self._loop.call_later(timeout_s, self._fail, "it was silent for too long")
        self._transport.writelines((head, body))
        try:
            return await self._answer
        finally:
            if timer:
                timer.cancel()
            self._answer = None

    def abort(self) -> None:
        """Hang up."""
        self._transport.abort()

    def _fail(self, said: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(IncompleteResponse(said) if self._size_bytes else NoResponse(said))

    # Called by the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._size_bytes += len(data)
        if self._size_bytes > self._most_bytes:
            self._fail(f"it is longer than {self._most_bytes} bytes")
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"what it said is no HTTP: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._ends_with_connection and error is None:
            self.on_message_complete()
        self._fail(f"the connection broke off: {error}" if error else "it closed the connection")
        if not self.gone.done():
            self.gone.set_result(None)

    # Called by the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._parts, self._has_length = [], False
        if self._answer is None or self._answer.done():  # an answer to nothing
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
        if status < 200 or self._answer is None or self._answer.done():  # an answer is still to come, or nobody waits
            return
        # What is not sent yet of a request that was answered early would go before the next one.
        self.is_reusable = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()
        self._used_at = time.monotonic()
        self._answer.set_result(ClientResponse(status, b"".join(self._parts)))


def _basic(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    name = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"}


def _lines(headers: dict[str, str]) -> bytes:
    for name, value in headers.items():
        if not value.isprintable():
            raise ValueError(f"the header {name} has more than one line")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")

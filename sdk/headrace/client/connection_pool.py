"""The sync client's sockets: ``http.client`` with a small pool of connections.

* Proxy settings of the environment are ignored.
* A connection is kept between calls.
* A connection that the server has closed is not reused.
* A request is sent in one write.
* A pull returns a batch whose arrays are views of one aligned buffer.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headrace.client.buffer_pool import BufferPool
from headrace.client.requests import ApiRequest, ApiResponse, TransportFailure, request_headers
from headrace.errors import InvalidRequest

IDLE_CONNECTIONS = 2
"""Idle connections kept open: one for the training loop, one for lease renewal."""

CONNECT_TIMEOUT_S = 5.0
"""Longest time to open a connection. A loopback or cluster address accepts within milliseconds or not at all."""

READ_TIMEOUT_S = 30.0
"""Longest silence beyond the wait that a request asks for."""


class Origin:
    """The address of the service: scheme, host, port and the path before ``/v1``."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # an incomplete IPv6 address, or an invalid port
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(
                f"{url!r} is not the address of an orchestrator.", hint="Write it as in http://127.0.0.1:8470."
            )
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.prefix = parts.path.rstrip("/")
        self.url = url.rstrip("/")


class ConnectionPool:
    """Sends requests and reads responses. Safe for use by several threads."""

    def __init__(self, origin: Origin, token: str) -> None:
        self.origin = origin
        self.token = token
        self._lock = threading.Lock()
        self._buffers = BufferPool()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = self._aborted = False
        self._tls = ssl.create_default_context() if origin.secure else None

    def send(self, request: ApiRequest) -> ApiResponse | TransportFailure:
        """Send once. A network error is returned as a ``TransportFailure``, never raised."""
        connection = self._take()
        try:
            if connection.sock is None:
                connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return TransportFailure(detail=f"cannot connect to {self.origin.url}: {_describe(error)}", sent=False)
        with self._lock:
            self._busy.add(connection)
            aborted = self._aborted
        try:
            if aborted:
                raise ConnectionAbortedError("the client was closed")
            connection.sock.settimeout(request.wait_s + (request.read_timeout_s or READ_TIMEOUT_S))
            connection.request(
                request.method,
                self.origin.prefix + request.target,
                body=request.body or None,
                headers=request_headers(self.token, request),
            )
            response = connection.getresponse()
            body = self._read(response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return TransportFailure(detail=_describe(error), sent=True)
        finally:
            with self._lock:
                self._busy.discard(connection)
        received = ApiResponse(status=response.status, headers=_lower_case_headers(response), body=body)
        self._give_back(connection, keep=not response.will_close)
        return received

    def abort(self) -> None:
        """Close all connections, including those in use: their requests end as a ``TransportFailure``."""
        self.close()
        with self._lock:
            self._aborted = True
            for connection in self._busy:
                with contextlib.suppress(OSError, AttributeError):  # already closed
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close idle connections; a connection in use closes after its response."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> memoryview:
        if response.length is None:  # chunked, or delimited by the end of the connection
            return memoryview(response.read())
        buffer = self._buffers.take(response.length)
        size, at = len(buffer), 0
        while at < size:
            count = response.readinto(buffer[at:])
            if not count:
                raise http.client.IncompleteRead(b"", size - at)
            at += count
        response.close()
        return buffer

    def _take(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._new()
            if not _closed_by_peer(connection.sock):
                return connection
            connection.close()

    def _new(self) -> http.client.HTTPConnection:
        origin = self.origin
        if self._tls is not None:
            return _SecureSingleWriteConnection(origin.host, origin.port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        return _SingleWriteConnection(origin.host, origin.port, timeout=CONNECT_TIMEOUT_S)

    def _give_back(self, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()


class _SingleWriteConnection(http.client.HTTPConnection):
    """A connection that sends head and body in one write.

    ``http.client`` sends them one by one: two system calls here, and two wake-ups of the server.
    """

    def request(self, *args: Any, **options: Any) -> None:
        self._parts: list[Any] = []
        super().request(*args, **options)
        parts, self._parts = self._parts, []
        super().send(b"".join(parts))

    def send(self, data: Any) -> None:
        self._parts.append(data)


class _SecureSingleWriteConnection(_SingleWriteConnection, http.client.HTTPSConnection):
    pass


def _closed_by_peer(sock: socket.socket) -> bool:
    """True if the server closed an idle connection, which is then readable."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _lower_case_headers(response: http.client.HTTPResponse) -> Mapping[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server was silent for too long"
    if isinstance(error, http.client.IncompleteRead):
        return f"the response broke off {error.expected} bytes before its end"
    return f"{type(error).__name__}: {error}".rstrip(": ")

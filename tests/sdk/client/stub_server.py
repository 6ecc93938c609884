"""A scripted HTTP server on a real socket: it sends scripted responses, and records the requests."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from headrace.errors import HeadraceError
from headrace.wire import messages


@dataclass
class ReceivedRequest:
    """One request as it was received."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """One response. ``drop`` closes the connection instead; ``cut`` closes it in the middle of the body, ``hang_up``
    after the body, without announcing it."""

    status: int = 200
    body: bytes = b""
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    cut: bool = False
    hang_up: bool = False


def ok(value: Any = None, *, epoch: int = 1, status: int = 200) -> Reply:
    """A JSON response of the orchestrator."""
    body = b"" if value is None else msgspec.json.encode(value)
    return Reply(status, body, headers={messages.HEADER_EPOCH: str(epoch)})


def problem(error: HeadraceError, *, epoch: int = 1) -> Reply:
    """An error of the orchestrator."""
    body = msgspec.json.encode(error.problem())
    return Reply(error.status, body, messages.PROBLEM_MEDIA_TYPE, {messages.HEADER_EPOCH: str(epoch)})


def page(status: int) -> Reply:
    """The page of a proxy in place of the orchestrator's response."""
    html = f"<html><head><title>{status} Gateway Time-out</title></head></html>".encode()
    return Reply(status, html, "text/html; charset=utf-8", {"Server": "proxy/1.0"})


def batch(body: bytes, *, generation: int = 1, lease_s: float = 300.0, epoch: int = 1) -> Reply:
    """A batch with its lease."""
    head = {
        messages.HEADER_EPOCH: str(epoch),
        messages.HEADER_GENERATION: str(generation),
        messages.HEADER_LEASE_S: str(lease_s),
    }
    return Reply(200, body, messages.BATCH_MEDIA_TYPE, head)


NO_RESPONSE = Reply(drop=True)
"""The request is read, and the connection closed without a response."""

ScriptedReply = Reply | Callable[[ReceivedRequest], Reply]


class StubServer:
    """Scripted responses by ``"METHOD /path"``, in order; the last one of a route is repeated."""

    def __init__(self) -> None:
        self._replies: dict[str, deque[ScriptedReply]] = defaultdict(deque)
        self._lock = threading.Lock()
        self.requests: list[ReceivedRequest] = []
        self.arrived = threading.Condition(self._lock)
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub._respond(self)

            do_POST = do_DELETE = do_GET  # noqa: N815 - http.server calls these names

            def log_message(self, *args: object) -> None:
                """Tests are quiet."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignored: some tests close the connection during a response."""

            def shutdown_request(self, request: Any) -> None:
                super().shutdown_request(request)
                stub.hung_up.set()

        self.hung_up = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on(self, route: str, *replies: ScriptedReply) -> None:
        """Script a route."""
        self._replies[route].extend(replies)

    def requests_to(self, route: str) -> list[ReceivedRequest]:
        """The requests to a route so far."""
        with self._lock:
            return [request for request in self.requests if f"{request.method} {request.path}" == route]

    def wait_for(self, route: str, count: int, timeout_s: float = 10.0) -> list[ReceivedRequest]:
        """Wait for that many requests to a route; returns them."""
        with self.arrived:
            met = self.arrived.wait_for(
                lambda: sum(f"{request.method} {request.path}" == route for request in self.requests) >= count,
                timeout_s,
            )
        assert met, f"{route} was not called {count} times within {timeout_s} s"
        return self.requests_to(route)

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        request = ReceivedRequest(
            handler.command, parts.path, query, dict(handler.headers.items()), body, handler.client_address[1]
        )
        with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
            queue = self._replies.get(f"{request.method} {request.path}")
            scripted = None if not queue else queue[0] if len(queue) == 1 else queue.popleft()
        reply = scripted(request) if callable(scripted) else scripted
        _send(handler, reply or Reply(404, b"no such route in the stub", "text/plain"))


def _send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    if reply.drop:
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
        return
    handler.send_response(reply.status)
    for name, value in {"Content-Type": reply.media_type, **reply.headers}.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(reply.body)))
    handler.end_headers()
    handler.wfile.write(reply.body[: len(reply.body) // 2] if reply.cut else reply.body)
    if reply.cut or reply.hang_up:
        handler.close_connection = True

"""The HTTP protocol of the services."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import tomllib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from headrace.errors import SetupError
from headrace.server.uvicorn_protocol import (
    DISCONNECT_CALLBACKS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_WAITING_REQUESTS,
    SEND_BUFFER_BYTES,
    UVICORN_RANGE,
    BodyHandler,
    BodyParts,
    HttpProtocol,
    Respond,
    _bound_send_buffer,
    require_supported_uvicorn,
)
from scripts.check_tree import ROOT
from tests.sdk.server.wire import Wire, connected, settled

HEAD = b"POST /direct HTTP/1.1\r\nContent-Length: 4\r\n"


@pytest.mark.parametrize("version", ["0.52.0", "0.55.0", "0.55.0.dev1", "1.0.0"])
def test_an_unsupported_version_of_uvicorn_is_refused_with_the_versions_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str
):
    monkeypatch.setattr(uvicorn, "__version__", version)
    with pytest.raises(SetupError, match=f"uvicorn {version} is installed") as refused:
        require_supported_uvicorn()
    assert refused.value.hint == f"pip install 'uvicorn{UVICORN_RANGE}'"


@pytest.mark.parametrize("version", ["0.53.0", "0.54.0", "0.54.7"])
def test_a_supported_version_of_uvicorn_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(uvicorn, "__version__", version)
    require_supported_uvicorn()


@pytest.mark.parametrize("extra", ["server", "sandbox-service"])
def test_the_extras_require_the_versions_that_are_checked_at_start(extra: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"uvicorn{UVICORN_RANGE}" in project["optional-dependencies"][extra]


class App:
    """Handles requests to /direct directly; ``tasks`` lists the paths of the requests that got a task."""

    def __init__(self) -> None:
        self.handled: list[tuple[bytes, Respond]] = []
        self.tasks: list[str] = []
        self.ends: list[str] = []

    def direct(self, scope: Any) -> BodyHandler | None:
        return (lambda body, respond: self.handled.append((body, respond))) if scope["path"] == "/direct" else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.tasks.append(scope["path"])
        self.ends.append((await receive())["type"])

    def respond(self, number: int) -> None:
        body, respond = self.handled[number]
        respond(200, b"content-length: %d\r\n" % len(body), body)


def responses(*bodies: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body) for body in bodies]


async def test_a_small_request_that_the_application_handles_directly_needs_no_task_and_its_response_is_one_write():
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + b"\r\nbo")
    await settled()
    assert not app.handled
    protocol.data_received(b"dy")
    assert [body for body, _ in app.handled] == [b"body"]
    await settled()
    assert not wire.written
    app.respond(0)
    assert wire.written == responses(b"body")
    assert not app.tasks
    protocol.connection_lost(None)


async def test_the_requests_of_a_connection_are_handled_one_after_the_other_in_order():
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + b"\r\none." + HEAD + b"\r\ntwo.")
    assert [body for body, _ in app.handled] == [b"one."]
    app.respond(0)
    assert [body for body, _ in app.handled] == [b"one.", b"two."]
    app.respond(1)
    assert wire.written == responses(b"one.", b"two.")
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    "request_", [HEAD + b"Expect: 100-continue\r\n\r\n", HEAD.replace(b"/direct", b"/all") + b"\r\n"]
)
async def test_a_request_that_awaits_100_continue_or_is_not_handled_directly_gets_a_task(
    request_: bytes,
):
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(request_)
    await settled()
    protocol.data_received(b"body")
    await settled()
    assert not app.handled
    assert len(app.tasks) == 1
    protocol.connection_lost(None)


async def test_a_client_that_disconnects_in_the_middle_of_its_body_is_seen_by_the_application():
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + b"\r\nbo")
    protocol.connection_lost(None)
    await settled()
    assert not app.handled
    assert app.ends == ["http.disconnect"]


@pytest.mark.parametrize("close", [b"Connection: close\r\n", b""], ids=["the client requests it", "the service stops"])
async def test_a_response_announces_the_end_of_its_connection(close: bytes):
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + close + b"\r\nbody")
    if not close:
        protocol.shutdown()
    app.respond(0)
    assert wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbody"]
    assert wire.closed
    protocol.connection_lost(None)


async def test_no_reference_to_a_request_remains_after_its_response():
    """The garbage collector rarely examines old objects, so a reference cycle would stay for long."""
    app, wire = App(), Wire()
    gc.disable()
    try:
        protocol: HttpProtocol | None = connected(app, wire)
        assert protocol is not None
        protocol.data_received(HEAD + b"\r\nbody")
        assert not protocol.cycle.body
        app.respond(0)
        app.handled.clear()
        protocol.connection_lost(None)
        reference = weakref.ref(protocol)
        protocol = None
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [lambda protocol, wire: protocol.connection_lost(None), lambda _, wire: wire.close()])
async def test_a_response_is_dropped_if_the_client_disconnected_or_the_connection_was_closed(
    end: Callable[[HttpProtocol, Wire], None],
):
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + b"\r\nbody")
    end(protocol, wire)
    app.respond(0)
    assert not wire.written


@pytest.mark.parametrize("disconnects", [False, True])
async def test_a_response_waits_while_its_client_does_not_read(disconnects: bool):
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received(HEAD + b"\r\nbody")
    protocol.pause_writing()
    app.respond(0)
    await settled()
    assert not wire.written
    if disconnects:
        protocol.connection_lost(None)
    else:
        protocol.resume_writing()
    await settled()
    assert wire.written == ([] if disconnects else responses(b"body"))
    if not disconnects:
        protocol.connection_lost(None)


async def test_callbacks_that_an_application_adds_to_a_scope_are_called_when_the_client_disconnects():
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][DISCONNECT_CALLBACKS].append(lambda: called.append(scope["path"]))
        await receive()

    protocol = connected(app, Wire())
    protocol.data_received(b"GET /here HTTP/1.1\r\n\r\n")
    await settled()
    assert not called
    protocol.connection_lost(None)
    assert called == ["/here"]
    await settled()


async def test_a_body_of_several_buffers_is_sent_without_joining_them():
    parts = BodyParts((b"bo", memoryview(b"dy")))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": parts})

    wire = Wire()
    protocol = connected(app, wire)
    protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await settled()
    assert wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"]
    assert wire.buffers == list(parts.buffers)
    protocol.connection_lost(None)


@pytest.mark.parametrize(("theirs", "bounded"), [("127.0.0.1", True), ("127.0.0.2", False)])
async def test_unread_data_for_a_client_on_this_machine_fits_into_a_processors_cache(theirs: str, bounded: bool):
    """Another loopback address stands for another machine. The kernel may grant less than the requested size
    (``net.core.wmem_max``), so the expected size is that of a socket with the same request."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Sizes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            _bound_send_buffer(transport)
            ours = transport.get_extra_info("socket")
            accepted.set_result(ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            transport.close()

    server = await asyncio.get_running_loop().create_server(Sizes, "127.0.0.1", 0)
    async with server:
        with socket.create_connection(server.sockets[0].getsockname(), source_address=(theirs, 0)):
            size_bytes = await accepted
    with socket.socket() as reference:
        reference.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        assert (size_bytes == reference.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)) is bounded


CHUNK_BYTES = 256 << 10
"""Most bytes that an event loop reads at once."""


def refusal(wire: Wire) -> tuple[int, str]:
    """Status and code of the one response, which closes the connection."""
    head, _, body = b"".join(wire.written).partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    assert b"connection: close" in head
    assert wire.closed
    return int(head.split()[1]), json.loads(body)["code"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nlong: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nlong: " + b"x" * (10 * CHUNK_BYTES),  # one header that never ends
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * CHUNK_BYTES,
        b"\r\n" * CHUNK_BYTES,
    ],
    ids=["a long path", "a long header", "an endless header", "many headers", "endless headers", "empty lines"],
)
async def test_the_head_of_a_request_is_bounded(data: bytes):
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    feed(protocol, wire, data)
    assert refusal(wire) == (431, "request-head-too-large")
    await settled()
    assert not app.tasks
    protocol.connection_lost(None)


def feed(protocol: HttpProtocol, wire: Wire, data: bytes) -> int:
    """Pass data as an event loop does, until the connection is closed; returns the number of bytes passed."""
    for start in range(0, len(data), CHUNK_BYTES):
        if wire.closed:
            return start
        protocol.data_received(data[start : start + CHUNK_BYTES])
    return len(data)


async def test_a_head_within_the_bounds_is_read_whatever_the_size_of_the_body_behind_it():
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    headers = b"a: b\r\n" * (MAX_HEADERS - 2) + b"long: " + b"x" * (MAX_HEAD_BYTES - 2000) + b"\r\n"
    body = bytes(2 * CHUNK_BYTES)
    feed(protocol, wire, b"POST /all HTTP/1.1\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), headers, body))
    await settled()
    assert app.tasks == ["/all"]
    assert b"431" not in b"".join(wire.written)
    protocol.connection_lost(None)


CHUNKED = b"POST /all HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * CHUNK_BYTES, b"long: " + b"x" * 4 * CHUNK_BYTES])
async def test_trailers_are_bounded(trailers: bytes):
    wire = Wire()
    protocol = connected(App(), wire)
    assert feed(protocol, wire, CHUNKED + trailers) <= 2 * CHUNK_BYTES
    assert wire.closed
    protocol.connection_lost(None)


async def test_trailers_are_dropped_so_a_request_has_the_headers_that_it_began_with():
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append(scope["headers"])

    protocol = connected(app, Wire())
    protocol.data_received(CHUNKED + b"authorization: Bearer of-somebody\r\n\r\n")
    await settled()
    assert seen == [[(b"transfer-encoding", b"chunked")]]
    assert not protocol.headers
    protocol.connection_lost(None)


async def test_the_requests_that_wait_on_a_connection_are_bounded():
    app, wire = App(), Wire()
    protocol = connected(app, wire)
    protocol.data_received((HEAD + b"\r\nbody") * (1 + MAX_WAITING_REQUESTS))
    assert not wire.closed
    protocol.data_received(HEAD + b"\r\nbody")
    assert wire.closed
    assert not wire.written, "it would be read as the response to the first request"
    assert len(protocol.pipeline) == MAX_WAITING_REQUESTS
    protocol.connection_lost(None)


async def test_a_request_that_cannot_be_parsed_is_answered_with_a_problem_body_and_not_logged(
    caplog: pytest.LogCaptureFixture,
):
    wire = Wire()
    protocol = connected(App(), wire)
    protocol.data_received(b"HELLO\r\n\r\n")
    assert refusal(wire) == (400, "invalid-request")
    assert not caplog.records
    protocol.connection_lost(None)

"""HTTP as the orchestrator speaks it: what it receives without copies, and answers in one step."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace_orchestrator.api.answering import WHOLE
from headrace_orchestrator.server import Protocol
from tests.orchestrator.serving import Api
from tests.orchestrator.test_request_timeouts import connected

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"epoch":1}'


class Wire(asyncio.Transport):
    """A transport that remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.reader = cast(asyncio.BufferedProtocol, protocol)

    def receive(self, data: bytes) -> None:
        memoryview(self.reader.get_buffer(-1))[: len(data)] = data
        self.reader.buffer_updated(len(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def protocol_of(app: Any, wire: Wire) -> Protocol:
    config = uvicorn.Config(app, http=Protocol, lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    protocol = Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    return protocol


async def test_an_answer_that_is_there_whole_goes_out_in_one_write():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert WHOLE in scope["extensions"]
        await send({"type": WHOLE, "status": 200, "head": b"content-length: 2\r\n", "body": b"ok"})

    wire = Wire()
    protocol = protocol_of(app, wire)
    wire.receive(GET)
    while not wire.written:
        await asyncio.sleep(0)
    assert wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
    protocol.connection_lost(None)


async def test_a_body_that_comes_in_one_part_is_handed_on_without_a_copy():
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend([await receive(), await receive()])

    wire = Wire()
    protocol = protocol_of(app, wire)
    wire.receive(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
    whole, parts = b"part", (b"la", b"t", b"er")
    protocol.on_body(whole)
    while protocol.cycle.body:
        await asyncio.sleep(0)
    for part in parts:
        protocol.on_body(part)
    assert isinstance(protocol.cycle.body, bytearray), "many small chunks are not copied again for each"
    while len(received) < 2:
        await asyncio.sleep(0)
    assert received[0]["body"] is whole
    assert received[1]["body"] == b"later"
    protocol.connection_lost(None)


async def test_what_comes_in_is_parsed_where_the_kernel_put_it():
    """All connections share the place, so that nothing may be left in it."""
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append((scope["path"], dict(scope["headers"])[b"name"], (await receive())["body"]))

    wires = [Wire(), Wire()]
    protocols = [protocol_of(app, wire) for wire in wires]
    for number, wire in enumerate(wires):
        wire.receive(b"POST /%d HTTP/1.1\r\nName: %d\r\nContent-Length: 1\r\n\r\n%d" % (number, number, number))
    assert wires[0].reader.get_buffer(-1) is wires[1].reader.get_buffer(-1)
    while len(received) < 2:
        await asyncio.sleep(0)
    assert received == [("/0", b"0", b"0"), ("/1", b"1", b"1")]
    for protocol in protocols:
        protocol.connection_lost(None)


async def test_answers_come_in_the_order_of_their_requests(api: Api):
    async with connected(api) as (reader, writer):
        writer.write(GET + GET.replace(b"healthz", b"nothing") + GET)
        for status in (b"200", b"404", b"200"):
            assert status in await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(int(length[16:]))


async def test_a_head_request_gets_the_length_and_no_body(api: Api):
    async with connected(api) as (reader, writer):
        writer.write(GET.replace(b"GET", b"HEAD") + GET)
        assert b"content-length: %d\r\n" % len(BODY) in await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(len(BODY)) == BODY


@pytest.mark.parametrize(
    "request_", [GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), GET.replace(b"1.1", b"1.0")]
)
async def test_a_client_that_goes_is_told_that_the_connection_ends(api: Api, request_: bytes):
    async with connected(api) as (reader, writer):
        writer.write(request_)
        answer = await cast(Any, reader.read())
        assert b"\r\nconnection: close\r\n\r\n" in answer
        assert answer.endswith(BODY)

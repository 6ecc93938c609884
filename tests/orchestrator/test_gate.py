"""Answers of one turn of the event loop leave in one write."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import cast

import pytest

from headrace_orchestrator.api.gathering import LARGE_BYTES, ON_ITS_WAY_BYTES, Pieces, _Gathering, _keep_in_cache


class Wire:
    """A transport that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []

    def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    def writelines(self, parts: list[bytes]) -> None:
        self.parts = parts
        self.calls.append(("write", b"".join(parts)))

    def close(self) -> None:
        self.calls.append(("close", b""))

    def is_closing(self) -> bool:
        return ("close", b"") in self.calls


async def test_what_an_answer_is_made_of_in_one_turn_of_the_event_loop_is_sent_in_one_write():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write(b"head")
    transport.write(b"body")
    assert not wire.calls
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"headbody"), ("write", b"next")]


async def test_what_is_there_whole_is_sent_at_once_and_behind_what_is_held_back():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write_whole(b"first")
    assert wire.calls == [("write", b"first")]
    transport.write(b"head")
    transport.write_whole(b"last")
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"first"), ("write", b"headlast")]


async def test_a_body_may_come_in_pieces_and_nobody_joins_them():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    pieces = Pieces((b"bo", memoryview(b"dy")))
    assert len(pieces) == 4
    transport.write(b"head")
    transport.write(pieces)
    await asyncio.sleep(0)
    assert wire.parts == [b"head", *pieces.parts]


@pytest.mark.parametrize("waits", [False, True], ids=["nothing waits", "something waits"])
async def test_a_large_answer_arrives_whole_whatever_the_kernel_takes_at_once(waits: bool):
    """While it copies, other threads run: it is asked in a call that gives up the interpreter."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=theirs)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        gathering = _Gathering(transport)
        parts = [b"head", os.urandom(3 * LARGE_BYTES), memoryview(os.urandom(2 * LARGE_BYTES)), b"tail"]
        sent = b"".join(parts)
        for part in parts:
            gathering.write(part)
            if waits:
                await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        transport.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("theirs", "bounded"), [("127.0.0.1", True), ("127.0.0.2", False)])
async def test_what_is_on_its_way_to_a_client_of_this_machine_fits_a_processors_cache(theirs: str, bounded: bool):
    """Another address of the loopback stands for another machine. What is asked for may be more than the kernel's bound
    (``net.core.wmem_max``): then the bound is meant."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Sizes(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            _keep_in_cache(transport)
            ours = transport.get_extra_info("socket")
            accepted.set_result(ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            transport.close()

    server = await asyncio.get_running_loop().create_server(Sizes, "127.0.0.1", 0)
    async with server:
        with socket.create_connection(server.sockets[0].getsockname(), source_address=(theirs, 0)):
            size_bytes = await accepted
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY_BYTES)
        assert (size_bytes == asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)) is bounded


async def test_a_connection_is_closed_behind_what_was_written_to_it():
    wire = Wire()
    transport = _Gathering(cast(asyncio.Transport, wire))
    transport.write(b"last words")
    transport.close()
    await asyncio.sleep(0)
    assert wire.calls == [("write", b"last words"), ("close", b"")]

"""uvicorn's HTTP protocol, with fewer system calls.

* What an answer is made of in one turn of the event loop is sent in one write, in its order; what is there whole, at
  once.
* A body may come in pieces; nobody joins them.
* A connection is closed behind what was written to it.
* While the kernel copies a large answer, the other threads of the process run.
* What is on its way to a client of this machine fits a processor's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGE_BYTES = 256 << 10
"""From this size on, a copy takes longer than it takes to give up the interpreter and to get it back."""

ON_ITS_WAY_BYTES = 512 << 10
"""Sent and not yet read, on one machine: what is read again while a cache still holds it is read in two thirds of the
time. Between machines the kernel decides, by how far they are apart."""

MAX_BUFFERS = 1024
"""That one ``writev`` takes, by POSIX's least."""


class Pieces:
    """Bytes of a body, in pieces. ASGI knows bytes only; uvicorn asks for their length, and hands them on."""

    __slots__ = ("parts", "size_bytes")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = parts
        self.size_bytes = sum(map(len, parts))

    def __len__(self) -> int:
        return self.size_bytes


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn writes head and body of an answer one by one: two system calls here, two wake-ups of the client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        _keep_in_cache(transport)
        super().connection_made(cast(asyncio.Transport, _Gathering(cast(asyncio.Transport, transport))))


def _keep_in_cache(transport: asyncio.BaseTransport) -> None:
    ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    if ours and theirs and ours[0] == theirs[0]:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY_BYTES)


class _Gathering:
    """A transport that holds back what is written until the next turn of the event loop."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview | Pieces) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        if isinstance(data, Pieces):
            self._held += data.parts
        else:
            self._held.append(data)

    def write_whole(self, data: bytes) -> None:
        """Write what nothing is to join, behind what is held back."""
        if self._held:
            self._held.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if not held or self._transport.is_closing():
            return
        if sum(map(len, held)) >= LARGE_BYTES and not self._transport.get_write_buffer_size():
            held = self._copied(held)
        self._transport.writelines(held)

    def _copied(self, held: list[bytes | memoryview]) -> list[bytes | memoryview]:
        """Write what the kernel takes at once, without the interpreter, which uvloop would keep; gives the rest."""
        written = 0
        with contextlib.suppress(OSError):  # it takes nothing, or the connection is gone: the transport finds out
            written = os.writev(self._transport.get_extra_info("socket").fileno(), held[:MAX_BUFFERS])
        for number, part in enumerate(held):
            if written < len(part):
                return [memoryview(part)[written:], *held[number + 1 :]]
            written -= len(part)
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""uvicorn's HTTP protocol, with fewer copies of what is received.

* A body that comes in one part is handed on as the parser made it, without a copy.
* What comes in is parsed where the kernel put it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

READ_BYTES = 256 << 10
"""That one read takes at most; uvloop's own reads take as much."""


class ReceivingProtocol(HttpToolsProtocol):
    """uvicorn adds what it receives to a ``bytearray``, and makes bytes of that: two copies."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        transport.set_protocol(_Reader(self))

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment]  # adding to no bytes copies nothing
        elif not isinstance(self.cycle.body, bytearray):
            self.cycle.body = bytearray(self.cycle.body)  # adding to bytes copies all of them, for each small chunk
        super().on_body(body)


class _Place(threading.local):
    """Where all connections of an event loop are read to, one after the other: it stays in the processor's cache."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_BYTES))


_place = _Place()


class _Reader(asyncio.BufferedProtocol):
    """Reads for an HTTP protocol. Its parser is done with the bytes, or has copied them, before the next read."""

    __slots__ = ("_protocol", "_received", "_view")

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._received = protocol.data_received
        self._view = _place.view

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self._received(self._view[:nbytes])  # type: ignore[arg-type]  # the parser takes any buffer

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

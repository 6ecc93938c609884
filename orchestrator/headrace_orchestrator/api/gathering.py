"""uvicorn's HTTP protocol, with fewer system calls.

* What an answer is made of in one turn of the event loop is sent in one write, in its order.
* A connection is closed behind what was written to it.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn writes head and body of an answer one by one: two system calls here, two wake-ups of the client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, _Gathering(cast(asyncio.Transport, transport))))


class _Gathering:
    """A transport that holds back what is written until the next turn of the event loop."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.writelines(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

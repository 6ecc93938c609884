"""A connection in memory: the protocol of the services on a transport that records the data written."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from headrace.server.connection_limit import ConnectionLimit
from headrace.server.request_timeouts import RequestTimeouts
from headrace.server.uvicorn_protocol import HttpProtocol


class Wire(asyncio.Transport):
    """A transport that records the data written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.buffers: list[Any] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.buffers += list_of_data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def connected(app: Any, wire: Wire, limit: ConnectionLimit | None = None) -> HttpProtocol:
    """The protocol of a new connection; without ``limit`` it is the only one of its service."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, proxy_headers=False)
    protocol = HttpProtocol(
        limit or ConnectionLimit(1, 1, asyncio.get_running_loop().time),
        RequestTimeouts(idle_s=60, request_s=60),
        config=config,
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
    )
    protocol.connection_made(wire)
    return protocol


async def settled() -> None:
    """Wait until every task that is ready has run."""
    for _ in range(5):
        await asyncio.sleep(0)

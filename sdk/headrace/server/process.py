"""The process of an HTTP service: its event loop, signals and HTTP server.

* An unsupported version of uvicorn is refused, with the versions to install.
* SIGTERM and SIGINT set an event, on which the service stops in order.
* A stop waits some time for open requests, and then closes the remaining connections.
* Open connections are limited, so that descriptors are left for everything else (``connection_limit``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvicorn
import uvloop

from headrace.server.connection_limit import FIRST_REQUEST_S, ConnectionLimit, limit_for_descriptors
from headrace.server.descriptors import raise_descriptor_limit
from headrace.server.listener import BACKLOG
from headrace.server.request_timeouts import RequestTimeouts
from headrace.server.uvicorn_protocol import HttpProtocol, HttpServer, require_supported_uvicorn

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: longer than the longest poll, and longer than clients reuse a connection, so
that none is closed while a request is on its way."""


def run_until_signal(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run ``serve`` in a new event loop. Its argument is an event that SIGTERM and SIGINT set.

    Raises SetupError for an unsupported version of uvicorn.
    """
    require_supported_uvicorn()
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_with_signals(serve))


async def _with_signals(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await serve(stop)


@contextlib.asynccontextmanager
async def http_server(
    app: Any, listener: socket.socket, *, request_timeout_s: float, shutdown_timeout_s: float
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the ASGI application in this event loop during the block. Yields a task that ends if the server does.

    A request must arrive completely within ``request_timeout_s`` seconds. At the end open requests have
    ``shutdown_timeout_s`` seconds to finish.
    """
    limit = limit_for_descriptors(asyncio.get_running_loop().time)
    timeouts = RequestTimeouts(idle_s=KEEP_ALIVE_S, request_s=request_timeout_s)
    protocol = functools.partial(HttpProtocol, limit, timeouts)
    server = HttpServer(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]  # called like a class
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)),
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    closing = asyncio.create_task(_close_late_connections(limit))
    try:
        yield task
    finally:
        closing.cancel()
        server.should_exit = True
        await asyncio.wait({task})
        server.abort_connections()  # of clients that did not read their response in time
    task.result()


async def _close_late_connections(limit: ConnectionLimit) -> None:
    while True:
        await asyncio.sleep(FIRST_REQUEST_S)
        limit.close_late()

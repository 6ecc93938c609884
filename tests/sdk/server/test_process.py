"""The process of an HTTP service."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from headrace.errors import SetupError
from headrace.server.listener import listen
from headrace.server.process import http_server, run_until_signal

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

WAITS = """
import asyncio
from headrace.server.process import run_until_signal

async def serve(stop):
    print("ready", flush=True)
    await stop.wait()
    print("stops in order", flush=True)

run_until_signal(serve)
"""


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_set_an_event_on_which_the_service_stops_in_order(name: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(name)
        assert process.communicate(timeout=30) == ("stops in order\n", None)
        assert process.returncode == 0


def test_an_unsupported_version_of_uvicorn_is_refused_with_the_versions_to_install(monkeypatch: pytest.MonkeyPatch):
    async def serve(stop: asyncio.Event) -> None:
        raise AssertionError("the service was started")

    monkeypatch.setattr(uvicorn, "__version__", "0.34.0")
    with pytest.raises(SetupError, match=r"uvicorn 0\.34\.0 is installed"):
        run_until_signal(serve)


class App:
    """Responds with ``body`` once ``proceed`` is set."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.called, self.proceed = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.called.set()
        await self.proceed.wait()
        headers = [(b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@contextlib.asynccontextmanager
async def requested(app: App, listener: socket.socket) -> AsyncIterator[asyncio.StreamReader]:
    """A connection whose request has reached the application."""
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    with contextlib.closing(writer):
        writer.write(REQUEST)
        await app.called.wait()
        yield reader


async def test_a_stop_waits_some_time_for_open_requests():
    app = App(b"ok")
    with contextlib.closing(listen("127.0.0.1", 0, option="--port")) as listener:
        async with contextlib.AsyncExitStack() as client:
            async with http_server(app, listener, request_timeout_s=60, shutdown_timeout_s=60):
                reader = await client.enter_async_context(requested(app, listener))
                asyncio.get_running_loop().call_later(0.2, app.proceed.set)
            assert (await reader.read()).endswith(b"connection: close\r\n\r\nok")


async def test_a_stop_then_closes_the_remaining_connections():
    app = App(bytes(64 << 20))
    app.proceed.set()
    with contextlib.closing(listen("127.0.0.1", 0, option="--port")) as listener:
        async with contextlib.AsyncExitStack() as client:
            async with http_server(app, listener, request_timeout_s=60, shutdown_timeout_s=1):
                reader = await client.enter_async_context(requested(app, listener))  # it reads nothing
            with contextlib.suppress(ConnectionResetError):
                assert len(await reader.read()) < len(app.body)

"""Doubles of policy servers: tiny policies in this event loop or in processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn

from headrace_workers.tiny_policy.faults import FaultInjector
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.server import TinyPolicyServer

COMMAND = [sys.executable, "-m", "headrace_workers.tiny_policy"]


@asynccontextmanager
async def double(port: int = 0) -> AsyncIterator[str]:
    """Run a double in this event loop; yields its address."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # the event loop sets it only for sockets that it makes
    app = TinyPolicyServer(TinyPolicy(), FaultInjector())
    config = uvicorn.Config(app, ws="none", lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server._serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()


class Double:
    """A double in its own process, which restarts at the same port."""

    def __init__(self) -> None:
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([*COMMAND, "--port", str(self._port)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address: str = json.loads(self._process.stdout.readline())["address"]
        self._port = int(self.address.rsplit(":", 1)[1])

    def signal(self, name: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(name)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=20)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


async def post(address: str, path: str, body: Any = None) -> Any:
    """Send a POST request to a double."""
    async with aiohttp.ClientSession() as session, session.post(f"{address}{path}", json=body) as response:
        raw = await response.read()
        assert response.status == 200, (response.status, raw)
        return json.loads(raw) if response.content_type == "application/json" else None


async def get(address: str, path: str) -> Any:
    """Send a GET request to a double."""
    async with aiohttp.ClientSession() as session, session.get(f"{address}{path}") as response:
        assert response.status == 200, response.status
        return json.loads(await response.read())

"""Sandbox services for tests: in this event loop, or in a process of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace_sandbox.pool.messages import PoolSettings
from headrace_sandbox.runtimes.base import Runtime
from headrace_sandbox.service.server import serve_with
from headrace_sandbox.service.settings import ServiceSettings

HEADRACE = str(Path(sys.executable).parent / "headrace")


@asynccontextmanager
async def service(runtime: Runtime, path: Path | None = None, **settings: Any) -> AsyncIterator[str]:
    """A service in this event loop; yields its address. ``pool``: fields of its bounds."""
    pool = PoolSettings(**settings.pop("pool", {}))
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    service_settings = ServiceSettings(runtime=runtime.name, socket=path, pool=pool, grace_s=1.0, **settings)
    running = asyncio.create_task(serve_with(runtime, service_settings, ready=address.set_result, stop=stop))
    await asyncio.wait({running, address}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if running.done():
            running.result()
        yield address.result()
    finally:
        stop.set()
        await running


class Process:
    """A service in a process of its own."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.address = f"unix://{path}"
        self._process = subprocess.Popen(
            [HEADRACE, "sandbox", "serve", "--socket", str(path), "--log-level", "warning", *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        try:
            line = self._process.stdout.readline().decode().strip()
            assert line == self.address, f"it said {line!r}"
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._wait()

    def stop(self) -> int:
        """Stop it with SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait(60)

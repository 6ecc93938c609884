"""The orchestrator process: data directory, service, HTTP server.

* The port answers from the start: ``/healthz`` with 200, ``/readyz`` with the phase of the start.
* A port in use, a data directory in use, and a public address without tokens are refused with advice.
* A failure of the store that only a new start can mend ends the process with an error, after its clients were told.
* SIGTERM stops the process gracefully: not ready, long polls answered, open requests ended, log and projection on
  disk, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable

from headrace.server import logs
from headrace.server.auth import load_auth
from headrace.server.listener import listen
from headrace.server.process import http_server, run_until_signal
from headrace_orchestrator import allocator
from headrace_orchestrator.api.app import OrchestratorApp
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log import writer_process
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.lifecycle import StartLogWriter, start_log_writer_thread
from headrace_orchestrator.settings import Address, Settings

log = logs.logger(__name__)

GC_THRESHOLDS = (50_000, 20, 1000)
"""Thresholds of the garbage collector. The state is large, long-lived and without cycles: with the default thresholds a
record takes three times as long to decode, and the event loop stops for long. The oldest generation is collected once
in a billion objects."""

SWITCH_INTERVAL_S = 0.0005
"""Time for which the event loop keeps the interpreter while another thread waits for it. Such threads read for pulls,
and write the projection and, on systems where no process does, the log."""

REQUEST_TIMEOUT_S = 600.0
"""Deadline for receiving a whole request, from its first byte. The default largest body arrives in time at 0.5 MB/s, a
worker's submission at a tenth of that."""


def run(settings: Settings, *, ready: Callable[[Address], None] = lambda address: None) -> None:
    """Run until SIGTERM or SIGINT; returns after a graceful stop. Raises SetupError if it cannot start, and StoreError
    if the store failed in a way that only a new start can mend."""
    logs.configure(settings.log_level, settings.log_format)
    allocator.keep_freed_memory()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_log_writer = writer_process.LogWriterProcess if writer_process.SUPPORTED else start_log_writer_thread
    run_until_signal(lambda stop: serve(settings, ready=ready, stop=stop, start_log_writer=start_log_writer))


async def serve(
    settings: Settings,
    *,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
    start_log_writer: StartLogWriter = start_log_writer_thread,
) -> None:
    """Run in this event loop until ``stop`` is set or the task is cancelled; both are graceful. Installs no signal
    handlers. ``ready`` is called once, when requests are answered. Raises SetupError if it cannot start, and StoreError
    if the store failed in a way that only a new start can mend."""
    auth = load_auth(settings.tokens, settings.host)
    directory = DataDirectory.claim(settings.data)
    try:
        listener = listen(settings.host, settings.port, option="--port")
        with contextlib.closing(listener):
            address = Address(settings.host, listener.getsockname()[1])
            directory.write_address(address.url)
            service = Service(settings, directory, start_log_writer=start_log_writer)
            app = OrchestratorApp(service, auth, service.metrics, settings.max_body_bytes, settings.max_wait_s)
            await _serve(settings, service, app, listener, lambda: ready(address), stop or asyncio.Event())
    finally:
        directory.close()


async def _serve(
    settings: Settings,
    service: Service,
    app: OrchestratorApp,
    listener: socket.socket,
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(service.start())
    failing = asyncio.create_task(service.stopped())
    try:
        async with http_server(
            app, listener, request_timeout_s=REQUEST_TIMEOUT_S, shutdown_timeout_s=settings.shutdown_timeout_s
        ) as http:
            try:
                await asyncio.wait({http, stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done() and not stopping.done():
                    starting.result()
                    ready()
                    await asyncio.wait({http, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                log.info("stopping")
                service.drain()
                stopping.cancel()
                failing.cancel()
    finally:
        await asyncio.wait({starting})
        await service.close()
    if failing.done() and not failing.cancelled():
        raise failing.result()
    log.info("stopped")

"""The service process: clean-up after killed ones, the runtime, the pool, HTTP and signals.

* At its start it removes what killed supervisors left; if it is killed itself, a clean-up process does this at once.
* It starts only with a runtime that passed its self-test.
* The socket can be used by its owner, or by the given group; an open bind without tokens is refused.
* A client that connects and sends nothing, or never completes its request, is disconnected after a time.
* SIGTERM stops it in order: it is not ready, refuses new requests, gives running programs some time, closes everything
  and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.errors import SetupError
from headrace.server import logs
from headrace.server.auth import Auth, load_auth
from headrace.server.listener import BACKLOG, listen
from headrace.server.process import http_server, run_until_signal
from headrace_sandbox.host.cleanup_process import CleanupProcess
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.pool.messages import WarmBounds
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.runtimes.base import Runtime, SupportsSweep, Template
from headrace_sandbox.runtimes.registry import ready_runtime
from headrace_sandbox.service.app import App
from headrace_sandbox.service.metrics import ServiceMetrics
from headrace_sandbox.service.settings import ServiceSettings

log = logs.logger(__name__)

REQUEST_TIMEOUT_S = 120.0
"""Time limit in seconds for a complete request, from its first byte; the largest default body needs 0.6 MB/s."""


def run(settings: ServiceSettings, *, ready: Callable[[str], None] = lambda address: None) -> None:
    """Run until SIGTERM or SIGINT; returns after a graceful stop. ``ready`` gets the address. Raises SetupError or
    SandboxFailure if it cannot start."""
    logs.configure(settings.log_level)
    run_until_signal(lambda stop: serve(settings, ready=ready, stop=stop))


async def serve(settings: ServiceSettings, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Run in this event loop until ``stop`` is set. Raises as ``run``."""
    with contextlib.ExitStack() as stack:
        endpoint = _listen(settings, stack)
        reaped = await asyncio.to_thread(reap)
        log.info("reaped", processes=len(reaped.processes), groups=len(reaped.groups), left=reaped.left)
        stack.enter_context(CleanupProcess())
        runtime = await ready_runtime(settings.runtime, allow_unsafe=settings.allow_unsafe)
        if isinstance(runtime, SupportsSweep):
            log.info("swept", sandboxes=await runtime.sweep())
        await _serve_with(runtime, settings, endpoint, ready, stop)
    log.info("stopped")


async def serve_with(
    runtime: Runtime, settings: ServiceSettings, *, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Run as ``serve``, with the given runtime; closes it."""
    with contextlib.ExitStack() as stack:
        await _serve_with(runtime, settings, _listen(settings, stack), ready, stop)


async def _serve_with(
    runtime: Runtime, settings: ServiceSettings, endpoint: Endpoint, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    warm = [(Template(), WarmBounds(least=settings.warm, most=settings.pool.sandboxes))] if settings.warm else []
    pool = Pool(runtime, settings.pool, warm)
    app = App(pool, endpoint.auth, ServiceMetrics(pool.counts), settings.max_body_bytes)
    await pool.start()
    try:
        await _serve(settings, app, pool, endpoint.listener, lambda: ready(endpoint.address), stop)
    finally:
        await pool.close()


async def _serve(
    settings: ServiceSettings,
    app: App,
    pool: Pool,
    listener: socket.socket,
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    stopping = asyncio.create_task(stop.wait())
    async with http_server(
        app, listener, request_timeout_s=REQUEST_TIMEOUT_S, shutdown_timeout_s=settings.grace_s
    ) as http:
        try:
            ready()
            log.info("ready", runtime=pool.runtime.name)
            await asyncio.wait({http, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            log.info("stopping")
            app.draining = True
            pool.drain()
            stopping.cancel()


class Endpoint(NamedTuple):
    """Listening socket and the authentication of its clients."""

    listener: socket.socket
    address: str
    auth: Auth


def _listen(settings: ServiceSettings, stack: contextlib.ExitStack) -> Endpoint:
    if settings.socket is not None:
        listener = _listen_unix(settings.socket, settings.group, stack)
        return Endpoint(listener, f"unix://{settings.socket}", Auth(None))
    auth = load_auth(settings.tokens, settings.host)
    listener = stack.enter_context(contextlib.closing(listen(settings.host, settings.port, option="--bind")))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return Endpoint(listener, f"http://{host}:{listener.getsockname()[1]}", auth)


def _listen_unix(path: Path, group: str, stack: contextlib.ExitStack) -> socket.socket:
    _remove_dead(path)
    listener = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
    old = os.umask(0o177)  # other users may never connect
    try:
        listener.bind(str(path))
    except OSError as error:
        raise SetupError(
            f"The socket {path} cannot be made: {error.strerror}.", hint="Name another with --socket."
        ) from error
    finally:
        os.umask(old)
    stack.callback(path.unlink, missing_ok=True)
    if group:
        try:
            os.chown(path, -1, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        except (KeyError, OSError) as error:
            raise SetupError(f"The socket cannot be given to the group {group!r}: {error}.") from error
        path.chmod(0o660)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _remove_dead(path: Path) -> None:
    """Remove the socket of a killed service. Raises SetupError if a service answers there, or it is not a socket."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise SetupError(f"{path} exists and is not a socket.", hint="Name another with --socket.")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SetupError(
                f"The socket {path} cannot be checked: {error.strerror}.", hint="Check --socket."
            ) from error
    raise SetupError(f"A service already answers at {path}.", hint="Use that one, or name another with --socket.")

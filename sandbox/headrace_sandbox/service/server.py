"""The service process: what dead ones left, the runtime, the pool, HTTP, signals.

* At its start it removes what killed supervisors left; a process beside it does the same the moment it is killed.
* It starts only with a runtime that passed its self-test.
* The socket can be used by its owner, or a group that was named; an open bind without tokens is refused.
* Nobody is waited for without end: neither who connects and says nothing, nor who does not end what it says.
* SIGTERM is graceful: not ready, nothing new, what runs gets some time, everything is closed, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog
import uvicorn

from headrace.errors import PortInUse, SetupError
from headrace.server.auth import Auth, load_auth
from headrace_sandbox.heir import Heir
from headrace_sandbox.pool.messages import Bounds
from headrace_sandbox.pool.pool import Pool
from headrace_sandbox.reaper import reap
from headrace_sandbox.runtimes.base import Runtime, Sweeps, Template
from headrace_sandbox.runtimes.registry import ready_runtime
from headrace_sandbox.service import logs
from headrace_sandbox.service.app import App
from headrace_sandbox.service.metrics import Metrics
from headrace_sandbox.service.protocol import KEEP_ALIVE_S, Protocol
from headrace_sandbox.service.settings import ServiceSettings

log = structlog.stdlib.get_logger(__name__)

BACKLOG = 2048
"""Connections that may wait to be taken: all workers of a host come back at once after a restart."""


def run(settings: ServiceSettings, *, ready: Callable[[str], None] = lambda address: None) -> None:
    """Run until SIGTERM or SIGINT; returns after a graceful stop. ``ready`` gets the address. Raises SetupError or
    SandboxFailure if it cannot start."""
    import uvloop

    logs.configure_logs(settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(settings, ready))


async def _until_signal(settings: ServiceSettings, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await serve(settings, ready=ready, stop=stop)


async def serve(settings: ServiceSettings, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Run in this event loop until ``stop`` is set. Raises as ``run``."""
    with contextlib.ExitStack() as stack:
        listening = _listen(settings, stack)
        reaped = await asyncio.to_thread(reap)
        log.info("reaped", processes=len(reaped.processes), groups=len(reaped.groups), left=reaped.left)
        stack.enter_context(Heir())
        runtime = await ready_runtime(settings.runtime, allow_unsafe=settings.allow_unsafe)
        if isinstance(runtime, Sweeps):
            log.info("swept", sandboxes=await runtime.sweep())
        await _serve_with(runtime, settings, listening, ready, stop)
    log.info("stopped")


async def serve_with(
    runtime: Runtime, settings: ServiceSettings, *, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """As ``serve``, with a runtime that is there; closes it."""
    with contextlib.ExitStack() as stack:
        await _serve_with(runtime, settings, _listen(settings, stack), ready, stop)


async def _serve_with(
    runtime: Runtime, settings: ServiceSettings, listening: Listening, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    warm = [(Template(), Bounds(least=settings.warm, most=settings.pool.sandboxes))] if settings.warm else []
    pool = Pool(runtime, settings.pool, warm)
    app = App(pool, listening.auth, Metrics(pool.counts), settings.max_body_bytes)
    await pool.start()
    try:
        await _serve(settings, app, pool, listening.listener, lambda: ready(listening.address), stop)
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
    server = _Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        ready()
        log.info("ready", runtime=pool.runtime.name)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping")
        app.draining = True
        pool.drain()
        server.should_exit = True
        stopping.cancel()
        await asyncio.wait({serving})
    serving.result()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listening(NamedTuple):
    """Where clients come in, and what they must show."""

    listener: socket.socket
    address: str
    auth: Auth


def _listen(settings: ServiceSettings, stack: contextlib.ExitStack) -> Listening:
    if settings.socket is not None:
        listener = _listen_unix(settings.socket, settings.group, stack)
        return Listening(listener, f"unix://{settings.socket}", Auth(None))
    auth = load_auth(settings.tokens, settings.host)
    listener = _listen_tcp(settings.host, settings.port, stack)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return Listening(listener, f"http://{host}:{listener.getsockname()[1]}", auth)


def _listen_unix(path: Path, group: str, stack: contextlib.ExitStack) -> socket.socket:
    _remove_dead(path)
    listener = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
    old = os.umask(0o177)  # from its first moment on nobody else may connect
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
    """Remove the socket of a service that was killed. Raises SetupError if one answers there, or it is no socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SetupError(f"{path} is there and is no socket.", hint="Name another with --socket.")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SetupError(f"{path} cannot be looked at: {error.strerror}.", hint="Check --socket.") from error
    raise SetupError(f"A service answers at {path} already.", hint="Use that one, or name another with --socket.")


def _listen_tcp(host: str, port: int, stack: contextlib.ExitStack) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = stack.enter_context(contextlib.closing(socket.socket(family, socket.SOCK_STREAM)))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is in use by another process.",
                hint="Stop that process, or choose another port with --bind (0 lets the system choose).",
                port=port,
            ) from error
        raise SetupError(f"Port {port} on {host} cannot be bound: {error.strerror}.", hint="Check --bind.") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener

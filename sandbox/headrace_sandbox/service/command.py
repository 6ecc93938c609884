"""The command ``headrace sandbox serve``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from headrace.errors import MissingExtra
from headrace_sandbox.host.supervisor import state_folder
from headrace_sandbox.pool.messages import PoolSettings
from headrace_sandbox.pool.pool import usual_settings
from headrace_sandbox.runtimes.registry import DEFAULT
from headrace_sandbox.service.settings import ServiceSettings

SOCKET = "service.sock"
"""Default name of the socket, in the state folder."""


@click.command("serve", short_help="Share this host's sandboxes between workers.")
@click.option("--runtime", default=DEFAULT, show_default=True, help="Runtime to use; `doctor` lists them.")
@click.option("--allow-unsafe", is_flag=True, help="Allow the runtime that does not isolate.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Unix socket to listen on. Default: one of this user's own.",
)
@click.option("--group", default="", help="Group (name or number) that may connect, besides the owner.")
@click.option(
    "--bind", default="", metavar="HOST:PORT", help="Address instead of a socket; beyond loopback needs --tokens."
)
@click.option(
    "--tokens",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file of bearer tokens for --bind; clients need the role sandbox.",
)
@click.option("--running", type=click.IntRange(1), help="Executions at a time. Default: two for each processor.")
@click.option("--sandboxes", type=click.IntRange(1), help="Live sandboxes of one template. Default 16.")
@click.option("--memory-mib", type=click.IntRange(16), help="Sum of all memory limits. Default: 3/4 of this machine's.")
@click.option("--waiting", type=click.IntRange(0), help="Requests that may wait; others are refused. Default 1024.")
@click.option("--warm", default=0, show_default=True, type=click.IntRange(0), help="Plain sandboxes to keep ready.")
@click.option("--max-body-mib", default=64, show_default=True, type=click.IntRange(1), help="Largest request body.")
@click.option(
    "--grace-s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds to end after SIGTERM.",
)
@click.option("--log-level", default="info", show_default=True, help="debug, info, warning or error.")
def serve(
    *,
    runtime: str,
    allow_unsafe: bool,
    socket: Path | None,
    group: str,
    bind: str,
    tokens: Path | None,
    running: int | None,
    sandboxes: int | None,
    memory_mib: int | None,
    waiting: int | None,
    warm: int,
    max_body_mib: int,
    grace_s: float,
    log_level: str,
) -> None:
    """Share this host's sandboxes: fair queues, leases and warm sandboxes behind a socket. Logs are JSON lines.

    \b
    Examples:
      headrace sandbox serve
      headrace sandbox serve --bind 0.0.0.0:8472 --tokens tokens.toml --warm 4
    """
    try:
        from headrace_sandbox.service.server import run
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"The sandbox service needs {error.name}, which is not installed.",
            hint="Run: pip install 'headrace[sandbox-service]'",
        ) from error
    if bind and (socket is not None or group):
        raise click.UsageError("--bind and --socket exclude each other.")
    if tokens is not None and not bind:
        raise click.UsageError("--tokens requires --bind; a socket is protected by its file's owner and group.")
    host, port = _address(bind) if bind else ("", 0)
    settings = ServiceSettings(
        runtime=runtime,
        allow_unsafe=allow_unsafe,
        socket=None if bind else (socket or state_folder() / SOCKET).absolute(),
        group=group,
        host=host,
        port=port,
        tokens=tokens,
        pool=_pool(running, sandboxes, memory_mib, waiting),
        warm=warm,
        max_body_bytes=max_body_mib << 20,
        grace_s=grace_s,
        log_level=log_level,
    )
    run(settings, ready=lambda address: click.echo(address))


def _pool(running: int | None, sandboxes: int | None, memory_mib: int | None, waiting: int | None) -> PoolSettings:
    options = {
        "running": running,
        "sandboxes": sandboxes,
        "memory_bytes": None if memory_mib is None else memory_mib << 20,
        "waiting": waiting,
    }
    settings = {name: value for name, value in options.items() if value is not None}
    return msgspec.structs.replace(usual_settings(), **settings)


def _address(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"--bind is {bind!r}; it must look like 127.0.0.1:8472.")
    return host.strip("[]"), int(port)

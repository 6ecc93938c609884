"""``headrace worker``: starts a worker process."""

from __future__ import annotations

import importlib.util
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import click

from headrace.common.ids import new_id
from headrace.errors import SetupError
from headrace.server import logs
from headrace.server.option_types import SecondsRange
from headrace.wire.messages import MAX_SLOTS
from headrace.wire.policy_server import canonical_address
from headrace_workers.imports import import_all
from headrace_workers.worker.process import run_worker
from headrace_workers.worker.worker import WorkerSettings

EXTRAS = {"reasoning-gym": "reasoning_gym"}
"""Capabilities that follow from installed packages: name and module."""

LEVELS = ("debug", "info", "warning", "error")


def _orchestrator(_: click.Context, __: click.Parameter, url: str) -> str:
    with suppress(ValueError):  # such as half an IPv6 address
        if urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname:
            return url
    raise click.BadParameter(f"{url!r} is not the address of an orchestrator, such as http://127.0.0.1:8470.")


def _endpoints(_: click.Context, __: click.Parameter, addresses: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for address in filter(None, addresses):
            canonical_address(address)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
    return addresses


@click.command(
    short_help="Run episodes of an orchestrator.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--orchestrator",
    "url",
    envvar="HEADRACE_URL",
    show_envvar=True,
    default="http://127.0.0.1:8470",
    show_default=True,
    callback=_orchestrator,
    help="Address of the orchestrator.",
)
@click.option("--slots", type=click.IntRange(1, MAX_SLOTS), default=64, show_default=True, help="Concurrent episodes.")
@click.option(
    "--policy-endpoint",
    "policy_endpoints",
    multiple=True,
    callback=_endpoints,
    help="Address of a policy server, for runs that name none. May be repeated, for several servers of one policy.",
)
@click.option("--policy", default="", metavar="MODULE:FACTORY", help="Use an in-process policy instead of a server.")
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE|FILE.py",
    help="Module or file to import first, such as one that registers environments. May be repeated.",
)
@click.option("--pool", default="default", show_default=True, help="Pool that the worker belongs to.")
@click.option(
    "--capabilities",
    default="",
    metavar="A,B",
    help=f"Capabilities of the worker, besides those that follow from installed packages ({', '.join(EXTRAS)}).",
)
@click.option(
    "--sandbox",
    default="",
    metavar="RUNTIME|ADDRESS",
    help="Runtime in which environments and tools run programs, such as bubblewrap (`headrace sandbox doctor` lists "
    "those that work), or the address of a `headrace sandbox serve`. Default: none; environments that need one fail.",
)
@click.option(
    "--name",
    default="",
    help="Name, which no other running worker has. A restarted worker may keep it. Default: host, process and a random "
    "part.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the bearer token. Default: the token in the variable HEADRACE_TOKEN.",
)
@click.option(
    "--grace-s",
    type=SecondsRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to finish running episodes after a request to stop.",
)
@click.option(
    "--spool-mib",
    type=click.IntRange(1, 1 << 20),
    default=256,
    show_default=True,
    help="Limit on finished records in memory while the orchestrator is unavailable.",
)
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="Lowest severity to log."
)
@click.pass_context
def worker(
    context: click.Context,
    *,
    url: str,
    slots: int,
    policy_endpoints: tuple[str, ...],
    policy: str,
    imports: tuple[str, ...],
    pool: str,
    capabilities: str,
    sandbox: str,
    name: str,
    token_file: Path | None,
    grace_s: float,
    spool_mib: int,
    log_level: str,
) -> None:
    """Run episodes: lease attempts, run them and submit the records. Logs are JSON lines on standard error."""
    logs.configure(log_level)
    import_all(imports)
    settings = WorkerSettings(
        name=name or default_name(),
        orchestrator=url,
        token=read_token(token_file),
        pool=pool,
        capabilities=all_capabilities(capabilities),
        sandbox=sandbox,
        imports=imports,
        slots=slots,
        spool_bytes=spool_mib << 20,
        grace_s=grace_s,
    )
    context.exit(run_worker(settings, policy_endpoints=policy_endpoints, policy=policy))


def default_name() -> str:
    """Make a name that is unique, also after a restart."""
    return f"{socket.gethostname()}-{os.getpid()}-{new_id()[-6:]}"


def read_token(token_file: Path | None) -> str:
    """Read the bearer token from the file or from HEADRACE_TOKEN; empty if absent. Raises SetupError."""
    if token_file is None:
        return os.environ.get("HEADRACE_TOKEN", "").strip()
    token = token_file.read_text().strip()
    if not token:
        raise SetupError(f"The token file {token_file} is empty.", hint="Put the worker's bearer token into it.")
    return token


def all_capabilities(capabilities: str) -> tuple[str, ...]:
    """Return the named capabilities and those that follow from installed packages, sorted."""
    named = {part.strip() for part in capabilities.split(",") if part.strip()}
    installed = {name for name, module in EXTRAS.items() if importlib.util.find_spec(module) is not None}
    return tuple(sorted(named | installed))

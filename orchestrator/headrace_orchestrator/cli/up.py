"""``headrace up``: run orchestrator, workers and tiny policy on this machine, as child processes.

* Up prints one line for each component, and the address of the page.
* A signal stops all components in order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from headrace.errors import SetupError
from headrace.store.regular_files import require_regular_entries
from headrace.wire.messages import MAX_SLOTS
from headrace.wire.policy_server import canonical_address
from headrace_orchestrator.cli.address_options import binding_options, data_option
from headrace_orchestrator.cli.output import emit_line, json_option, note, shared
from headrace_orchestrator.cli.processes import components
from headrace_orchestrator.cli.processes.components import await_answer
from headrace_orchestrator.cli.processes.supervisor import ProcessEvent, ProcessSupervisor
from headrace_orchestrator.cli.storage_options import storage_arguments, storage_options
from headrace_orchestrator.settings import Address

TINY_POLICY_PORT = 8471
"""Default port of the tiny policy, which the learners of the examples use."""

CHECK_INTERVAL_S = 0.2
"""Interval between checks of the children."""

WORKER_GRACE_S = 15.0
"""Time for workers to finish their episodes; then they return the unfinished ones."""

GRACE_S = 20.0
"""Time for any component to end before it is killed."""


@click.command(short_help="Run an orchestrator and workers on this machine.")
@data_option("Data directory; made if missing. Logs of the components are in its folder logs.")
@binding_options
@click.option("--workers", default=2, show_default=True, type=click.IntRange(0, 1024), help="Worker processes.")
@click.option(
    "--slots",
    default=32,
    show_default=True,
    type=click.IntRange(1, MAX_SLOTS),
    help="Episodes of each worker at a time.",
)
@click.option("--policy-endpoint", default="", help="Address of the policy server, such as vLLM's.")
@click.option("--tiny-policy", is_flag=True, help="Run the tiny policy too.")
@click.option(
    "--tiny-policy-port",
    default=TINY_POLICY_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of the tiny policy, to which learners send their weights. 0: the system chooses.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE|FILE.py",
    help="Module or file that workers import first; it registers environments. May be repeated.",
)
@click.option(
    "--sandbox",
    default="",
    metavar="RUNTIME",
    help="Sandbox runtime of the workers, such as bubblewrap, for `code:` and `python:` environments.",
)
@click.option(
    "--token", envvar="HEADRACE_TOKEN", show_envvar=True, default="", help="Token of the workers; needed with --tokens."
)
@storage_options
@json_option
def up(
    data: Path,
    host: str,
    port: int,
    workers: int,
    slots: int,
    policy_endpoint: str,
    tiny_policy: bool,
    tiny_policy_port: int,
    imports: tuple[str, ...],
    sandbox: str,
    tokens: Path | None,
    token: str,
    max_wait_s: float,
    **storage: Any,
) -> None:
    """Run an orchestrator and workers on this machine, until Ctrl-C.

    \b
    Examples:
      headrace up --tiny-policy
      headrace up --data /var/lib/headrace --workers 8 --policy-endpoint http://127.0.0.1:8000
    """
    if tiny_policy and policy_endpoint:
        raise click.UsageError("Give --tiny-policy or --policy-endpoint, not both.")
    if policy_endpoint:
        try:
            canonical_address(policy_endpoint)
        except ValueError as error:
            raise click.UsageError(f"{error}.") from error
    if tokens is not None and workers and not token:
        raise SetupError(
            "With --tokens, workers need a token too.", hint="Set HEADRACE_TOKEN to a token with the role worker."
        )
    runtimes = entry_points(group="headrace.runtimes").names
    is_address = "/" in sandbox or ":" in sandbox
    if sandbox and sandbox not in runtimes and not is_address:
        raise click.UsageError(f"No sandbox runtime is named {sandbox!r}. Known are: {', '.join(sorted(runtimes))}.")
    port = port or components.free_port()
    address = Address(host, port)
    components.require_free(host, port)
    tiny_policy_port = tiny_policy_port or components.free_port()
    if tiny_policy:
        components.require_free("127.0.0.1", tiny_policy_port, option="--tiny-policy-port")
    require_regular_entries(data)
    with stop_signal() as stop, ProcessSupervisor(data / "logs", on_event=_print_event, grace_s=GRACE_S) as supervisor:
        sleep = interruptible_sleep(stop)
        supervisor.start(
            components.orchestrator(
                data,
                host=host,
                port=port,
                tokens=tokens,
                arguments=["--max-wait-s", f"{max_wait_s}", *storage_arguments(storage)],
            )
        )
        await_answer(supervisor, "orchestrator", port, "/readyz", host=address.local_host, sleep=sleep)
        if tiny_policy:
            supervisor.start(components.tiny_policy("tiny-policy", tiny_policy_port))
            await_answer(supervisor, "tiny-policy", tiny_policy_port, "/health", sleep=sleep)
            policy_endpoint = f"http://127.0.0.1:{tiny_policy_port}"
        for number in range(workers):
            name = f"worker-{number}"
            supervisor.start(
                components.worker(
                    name,
                    address.url,
                    slots=slots,
                    policy_endpoint=policy_endpoint,
                    imports=imports,
                    sandbox=sandbox,
                    grace_s=WORKER_GRACE_S,
                    token=token,
                )
            )
        _print_addresses(address.url, policy_endpoint)
        while not stop.wait(CHECK_INTERVAL_S):
            supervisor.poll()
        note("Stopping.")


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Replace the handlers of SIGINT, SIGTERM and SIGHUP: they set the yielded event."""
    stop = threading.Event()
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, lambda *_: stop.set()) for name in names}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def interruptible_sleep(stop: threading.Event) -> Callable[[float], None]:
    """Make a sleep function that ends the command if the event is set."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise click.Abort

    return sleep


def _print_event(event: ProcessEvent) -> None:
    if shared().json:
        emit_line(event._asdict())
    else:
        detail = f"pid {event.detail}" if event.what == "started" else event.detail
        click.echo(f"{event.component:<14} {event.what} ({detail})")


def _print_addresses(url: str, policy_endpoint: str) -> None:
    if shared().json:
        emit_line({"url": url, "policy_endpoint": policy_endpoint})
        return
    click.echo(f"Page: {url}/  Policy: {policy_endpoint or 'named by each run'}  Ctrl-C stops all.")

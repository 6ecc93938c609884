"""``headrace up``: run orchestrator, workers and tiny policy on this machine, as child processes.

* Up prints one line for each component and where the page is.
* A signal stops all in order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from headrace.errors import SetupError
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

LOOK_S = 0.2
"""Interval between checks of the children."""

WORKER_GRACE_S = 15.0
"""Time for workers to finish their episodes; then they hand them back."""

GRACE_S = 20.0
"""Time for any component to end; then it is killed."""


@click.command(short_help="Run an orchestrator and workers on this machine.")
@data_option("Data directory; made if missing. Logs of the components are in its folder logs.")
@binding_options
@click.option("--workers", default=2, show_default=True, type=click.IntRange(0), help="Worker processes.")
@click.option(
    "--slots", default=32, show_default=True, type=click.IntRange(1), help="Concurrent episodes of each worker."
)
@click.option("--policy-endpoint", default="", help="Address of the policy server, such as vLLM's.")
@click.option("--tiny-policy", is_flag=True, help="Run the tiny policy too.")
@click.option(
    "--tiny-policy-port",
    default=TINY_POLICY_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port of the tiny policy; learners load their weights there. 0: a free one.",
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
    help="What workers run programs in, such as bubblewrap: for environments of `code:` and `python:`.",
)
@click.option(
    "--token", envvar="HEADRACE_TOKEN", show_envvar=True, default="", help="Token of the workers; with --tokens."
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
            "With --tokens, workers need a token too.", hint="Set HEADRACE_TOKEN to one whose role is worker."
        )
    port = port or components.free_port()
    url = Address(host, port).url
    components.require_free(host, port)
    tiny_policy_port = tiny_policy_port or components.free_port()
    if tiny_policy:
        components.require_free("127.0.0.1", tiny_policy_port)
    with stop_signal() as stop, ProcessSupervisor(data / "logs", on_event=_say, grace_s=GRACE_S) as supervisor:
        supervisor.start(
            components.orchestrator(
                data,
                host=host,
                port=port,
                tokens=tokens,
                arguments=["--max-wait-s", f"{max_wait_s}", *storage_arguments(storage)],
            )
        )
        await_answer(supervisor, "orchestrator", port, "/readyz", host=_local(host), sleep=pause(stop))
        if tiny_policy:
            supervisor.start(components.tiny_policy("tiny-policy", tiny_policy_port))
            await_answer(supervisor, "tiny-policy", tiny_policy_port, "/health", sleep=pause(stop))
            policy_endpoint = f"http://127.0.0.1:{tiny_policy_port}"
        for number in range(workers):
            name = f"worker-{number}"
            supervisor.start(
                components.worker(
                    name,
                    url,
                    slots=slots,
                    policy_endpoint=policy_endpoint,
                    imports=imports,
                    sandbox=sandbox,
                    grace_s=WORKER_GRACE_S,
                    token=token,
                )
            )
        _say_where(url, policy_endpoint)
        while not stop.wait(LOOK_S):
            supervisor.poll()
        note("Stopping.")


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, in place of their usual effect."""
    stop = threading.Event()
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, lambda *_: stop.set()) for name in names}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def pause(stop: threading.Event) -> Callable[[float], None]:
    """Sleep, and end the command if the event is set meanwhile."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise click.Abort

    return sleep


def _local(host: str) -> str:
    """The address under which this machine reaches a bound one."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _say(event: ProcessEvent) -> None:
    if shared().json:
        emit_line(event._asdict())
    else:
        detail = f"pid {event.detail}" if event.what == "started" else event.detail
        click.echo(f"{event.component:<14} {event.what} ({detail})")


def _say_where(url: str, policy_endpoint: str) -> None:
    if shared().json:
        emit_line({"url": url, "policy_endpoint": policy_endpoint})
        return
    click.echo(f"Page: {url}/  Policy: {policy_endpoint or 'named by each run'}  Ctrl-C stops all.")

"""``headrace top``: a live view of the learner's waiting, the runs and the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from headrace.client.sync_client import Client
from headrace.errors import Unavailable
from headrace.server.option_types import SecondsRange
from headrace.wire import messages
from headrace_orchestrator.cli import runs
from headrace_orchestrator.cli.output import (
    connect,
    console,
    emit,
    json_option,
    note,
    on_terminal,
    one_line,
    rich_table,
    service_options,
    shared,
    span,
    table,
)

WORKER_COLUMNS = ("worker", "pool", "slots", "leased", "seen", "state")


@click.command(short_help="Show live whether the learner is waiting, and on what.")
@click.option(
    "--interval",
    "interval_s",
    default=1.0,
    show_default=True,
    type=SecondsRange(0.1, 3600),
    help="Seconds.",
)
@click.option("--once", is_flag=True, help="Print once. Default if the output is piped.")
@service_options
@json_option
def top(interval_s: float, once: bool, url: str | None, token: str | None) -> None:
    """Show live whether the learner is waiting and on what, then runs and workers. Ctrl-C ends it.

    \b
    Example:
      headrace top --interval 0.5
    """
    with connect(url, token) as client:
        if shared().json:
            emit(client.status())
        elif once or not on_terminal():
            _print(client.status())
        else:
            watch(client, interval_s=interval_s)


def watch(
    client: Client, *, run: str | None = None, interval_s: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the service until Ctrl-C, or one run until it is over. A pipe or --json gets a line at each change."""
    with suppress(KeyboardInterrupt):  # the usual way to end a live view
        if shared().json or not on_terminal():
            _follow(client, run, interval_s, sleep)
        else:
            _live(client, run, interval_s, sleep)


def _live(client: Client, run: str | None, interval_s: float, sleep: Callable[[float], None]) -> None:
    with Live(console=console(), screen=run is None, auto_refresh=False) as live:
        while True:
            try:
                status = client.status()
            except Unavailable as error:
                live.update(Text(f"{error}", style="yellow"), refresh=True)
            else:
                selected = [entry for entry in status.runs if run in (None, entry.name)]
                live.update(_view(status, selected), refresh=True)
                if run is not None and all(entry.state != "active" for entry in selected):
                    return
            sleep(interval_s)


def verdict(run: messages.RunStatus) -> str:
    """A sentence that says whether the learner of a run waits, and on what."""
    if run.state != "active":
        return f"{run.name}: {run.state}"
    if run.learner_waiting:
        reasons = " ".join(reason.message for reason in run.reasons) or "no reason given"
        return f"{run.name}: the learner waits. {reasons}"
    troubles = "".join(f". {trouble}" for trouble in runs.problems(run))
    if run.learner_doing_s < 0:
        return f"{run.name}: no learner has pulled yet{troubles}"
    state = runs.learner_state(run)
    held = f", holding {run.learner_holds}" if run.learner_holds and state in ("silent", "gone") else ""
    seconds = run.learner_heard_s if state == "silent" else run.learner_doing_s
    return f"{run.name}: the learner is {state} ({span(seconds)}{held}){troubles}"


def worker_row(worker: messages.WorkerStatus) -> list[str]:
    """Format a worker as a row of ``WORKER_COLUMNS``."""
    state = "silent" if worker.silent else "draining" if worker.draining else "ok"
    return [worker.worker, worker.pool, str(worker.slots), str(worker.leased), span(worker.seen_s), state]


def _view(status: messages.ServiceStatus, selected: list[messages.RunStatus]) -> RenderableType:
    sentences = [
        Text.from_markup(f"[{'yellow' if entry.learner_waiting else 'green'}]●[/] {escape(one_line(verdict(entry)))}")
        for entry in selected
    ]
    head = f"headrace {status.version}, epoch {status.epoch}, up {span(status.uptime_s)}"
    return Group(
        Text(head, style="dim"),
        *(sentences or [Text("No runs yet.")]),
        Text(),
        rich_table(runs.COLUMNS, [runs.row(entry) for entry in selected]),
        Text(),
        rich_table(WORKER_COLUMNS, [worker_row(worker) for worker in status.workers]),
    )


def _print(status: messages.ServiceStatus) -> None:
    for entry in status.runs:
        click.echo(one_line(verdict(entry)))
    table(runs.COLUMNS, [runs.row(entry) for entry in status.runs])
    table(WORKER_COLUMNS, [worker_row(worker) for worker in status.workers])


def _follow(client: Client, run: str | None, interval_s: float, sleep: Callable[[float], None]) -> None:
    last = ""
    while True:
        selected = [entry for entry in client.runs() if run in (None, entry.name)]
        now = "; ".join(verdict(entry) for entry in selected)
        if now != last:
            note(now)
            last = now
        if run is not None and all(entry.state != "active" for entry in selected):
            return
        sleep(interval_s)

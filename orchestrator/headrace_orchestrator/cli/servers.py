"""``headrace servers``: list, add, drain and remove policy servers of a run."""

from __future__ import annotations

from collections.abc import Callable

import click

from headrace.client.sync_client import Client
from headrace.wire import messages
from headrace_orchestrator.cli.output import (
    connect,
    emit,
    json_option,
    note,
    service_options,
    shared,
    span,
    table,
)

COLUMNS = ("server", "state", "version", "paused", "running", "waiting", "cache", "reason")
"""Columns of the table. ``paused``: total pause for new weights. ``running`` and ``waiting``: requests. ``cache``:
share in use."""

ACTIONS: dict[str, Callable[[Client, str, str], None]] = {
    "add": Client.add_server,
    "drain": Client.drain_server,
    "remove": Client.remove_server,
}

FIRST_LOOK_S = 5.0
"""Longest wait for the first check of a server that was just added."""


def row(server: messages.PolicyServerStatus) -> list[str]:
    """Format a server as a row of ``COLUMNS``."""
    return [
        server.address,
        server.state,
        server.version or "–",
        span(server.paused_s),
        f"{server.running:.0f}",
        f"{server.waiting:.0f}",
        f"{server.kv_cache_used:.0%}",
        server.reason or "–",
    ]


def why_no_server(run: messages.RunStatus) -> str:
    """The reason that a run has no policy servers."""
    if run.state == "closed":
        return f"The run {run.name} is closed: it has no policy servers any more."
    if not run.spec.get("policy", {}).get("endpoints"):
        return f"The run {run.name} has no policy servers of its own: each worker asks that which it was started with."
    return f"The run {run.name} has no policy server now: all were removed, or the names in policy.endpoints give none."


@click.command(short_help="Show the policy servers of a run; add, drain or remove one.")
@click.argument("run")
@click.argument("action", required=False, type=click.Choice(list(ACTIONS)))
@click.argument("address", required=False)
@service_options
@json_option
def servers(run: str, action: str | None, address: str | None, url: str | None, token: str | None) -> None:
    """Show the policy servers of RUN. `add` adds one while it runs (or ends the drain of one), `drain` lets one finish
    its requests, `remove` removes it.

    \b
    Examples:
      headrace servers guess
      headrace servers guess add http://127.0.0.1:8472
    """
    if (action is None) != (address is None):
        raise click.UsageError(f"`{action}` needs the address of a server.")
    with connect(url, token) as client:
        if action is not None and address is not None:
            ACTIONS[action](client, run, address)
        found = client.servers(run)
        if any(server.state == "unknown" for server in found.servers):
            found = client.servers(run, revision=found.revision, wait_s=FIRST_LOOK_S)
        why_none = "" if found.servers else why_no_server(client.run(run))
    if shared().json:
        emit(found)
    elif found.servers:
        table(COLUMNS, [row(server) for server in found.servers])
    else:
        note(why_none)
    if found.sync:
        note(found.sync)
    if found.skipped:
        note(f"Skipped, since newer versions came before any server had them: {', '.join(found.skipped)}.")

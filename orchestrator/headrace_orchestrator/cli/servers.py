"""``headrace servers``: list, add, drain and remove policy servers of a run."""

from __future__ import annotations

from collections.abc import Callable

import click

from headrace.client.sync_client import Client
from headrace.wire import messages
from headrace_orchestrator.cli.output import connect, emit, json_option, note, service_options, shared, span, table

COLUMNS = ("server", "state", "version", "paused", "running", "waiting", "cache", "reason")
"""Columns of the table. ``paused``: total pause for new weights. ``running`` and ``waiting``: numbers of requests.
``cache``: share of the KV cache in use."""

ACTIONS: dict[str, Callable[[Client, str, str], None]] = {
    "add": Client.add_server,
    "drain": Client.drain_server,
    "remove": Client.remove_server,
}

FIRST_PROBE_S = 5.0
"""Longest wait for the first probe of a new server."""


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


def no_servers_reason(run: messages.RunStatus) -> str:
    """The reason that a run has no policy servers."""
    if run.state == "closed":
        return f"The run {run.name} is closed, so it has no policy servers."
    if not run.spec.get("policy", {}).get("endpoints"):
        return f"The run {run.name} has no policy servers of its own: each worker uses the one from its command line."
    return f"The run {run.name} has no policy server now: all were removed, or no name in policy.endpoints resolves."


@click.command(short_help="Show the policy servers of a run; add, drain or remove one.")
@click.argument("run")
@click.argument("action", required=False, type=click.Choice(list(ACTIONS)))
@click.argument("address", required=False)
@service_options
@json_option
def servers(run: str, action: str | None, address: str | None, url: str | None, token: str | None) -> None:
    """Show the policy servers of RUN. `add` adds a server to the running run, or ends its drain; `drain` sends it no
    new requests; `remove` removes it.

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
        reply = client.servers(run)
        if any(server.state == "unknown" for server in reply.servers):
            reply = client.servers(run, revision=reply.revision, wait_s=FIRST_PROBE_S)
        reason = "" if reply.servers else no_servers_reason(client.run(run))
    if shared().json:
        emit(reply)
    elif reply.servers:
        table(COLUMNS, [row(server) for server in reply.servers])
    else:
        note(reason)
    if reply.sync:
        note(reply.sync)
    if reply.skipped:
        note(f"Skipped versions, replaced by newer ones before any server loaded them: {', '.join(reply.skipped)}.")

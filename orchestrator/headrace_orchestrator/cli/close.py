"""``headrace close``: end a run."""

from __future__ import annotations

import click

from headrace_orchestrator.cli.output import connect, emit, json_option, note, service_options, shared


@click.command(short_help="End a run.")
@click.argument("run")
@service_options
@json_option
def close(run: str, url: str | None, token: str | None) -> None:
    """End RUN: stop dispatching and serving, and cancel running attempts. Stored trajectories stay.

    A closed run cannot be reopened. Closing it again changes nothing.

    \b
    Example:
      headrace close guess
    """
    with connect(url, token) as client:
        client.close_run(run)
        status = client.run(run)
    if shared().json:
        emit(status)
    else:
        note(f"The run {run} is {status.state}.")

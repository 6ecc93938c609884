"""``headrace runs``: a table of all runs."""

from __future__ import annotations

import click

from headrace.wire import messages
from headrace_orchestrator.cli.output import (
    connect,
    emit,
    json_option,
    note,
    number,
    service_options,
    shared,
    table,
)
from headrace_orchestrator.console.last_seen import learner_is_silent

COLUMNS = ("run", "version", "learner", "waits on", "groups", "queued", "leased", "done", "failed", "reward")
"""Columns of the table. ``groups`` are in flight; ``queued`` and ``leased`` are current episodes, the latter with the
policy servers' capacity if known; ``done`` and ``failed`` count ended episodes."""


def doing(run: messages.RunStatus) -> str:
    """The learner's activity in a word, or the end of the run."""
    if run.state != "active":
        return run.state
    if run.learner_waiting:
        return "waiting"
    return "silent" if learner_is_silent(run) else run.learner_doing or "–"


def row(run: messages.RunStatus) -> list[str]:
    """Format a run as a row of ``COLUMNS``."""
    waits = ", ".join(reason.code for reason in run.reasons) if run.learner_waiting else ""
    ended = run.episodes.get("finished", 0) + run.episodes.get("truncated", 0)
    return [
        run.name,
        run.version,
        doing(run),
        waits or "–",
        str(run.in_flight),
        str(run.queued),
        str(run.leased) if run.attainable is None else f"{run.leased} of {run.attainable}",
        str(ended),
        str(run.episodes.get("failed", 0)),
        number(run.mean_reward),
    ]


def troubles(run: messages.RunStatus) -> list[str]:
    """Sentences about persistent failures, whether or not the learner waits, and about a weight sync under way."""
    failing = [reason.message for reason in run.reasons if reason.code.endswith("-failing")]
    return [*failing, run.weight_sync] if run.weight_sync else failing


@click.command()
@service_options
@json_option
def runs(url: str | None, token: str | None) -> None:
    """List all runs: what each learner does, and what it waits on.

    `groups` are in flight. `queued` and `leased` are current episodes, with the policy servers' capacity if
    known; `done` counts episodes that ended by themselves or by a budget. `reward` is the mean of the last 256.
    Persistent failures are listed below the table.

    \b
    Example:
      headrace runs --json
    """
    with connect(url, token) as client:
        found = client.runs()
    if shared().json:
        emit(found)
    elif found:
        table(COLUMNS, [row(run) for run in found])
        for run in found:
            for trouble in troubles(run):
                note(f"{run.name}: {trouble}")
    else:
        note("No runs yet. `headrace run --help` says how to make one.")

"""``headrace runs``: all runs in a table."""

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
"""``groups`` are in flight; ``queued`` and ``leased`` are episodes now, the latter of how many the policy servers take
at a time, where that is known; ``done`` and ``failed`` are those that ended."""


def doing(run: messages.RunStatus) -> str:
    """What the learner does, in a word; how the run ended, if it did."""
    if run.state != "active":
        return run.state
    if run.learner_waiting:
        return "waiting"
    return "silent" if learner_is_silent(run) else run.learner_doing or "–"


def row(run: messages.RunStatus) -> list[str]:
    """One run as a line of the table; ``COLUMNS`` are its columns."""
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
    """What keeps failing, in sentences, whether or not the learner waits; and what a weight sync is at."""
    failing = [reason.message for reason in run.reasons if reason.code.endswith("-failing")]
    return [*failing, run.weight_sync] if run.weight_sync else failing


@click.command()
@service_options
@json_option
def runs(url: str | None, token: str | None) -> None:
    """List all runs: what each learner does, and what it waits on.

    `groups` are in flight. `queued` and `leased` are episodes now, of how many the policy
    servers take at a time, where that is known; `done` counts those that ended by themselves or by a
    budget. `reward` is the mean of the last 256. What keeps failing is said below the table.

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

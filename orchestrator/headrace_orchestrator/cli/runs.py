"""``headrace runs``: a table of all runs."""

from __future__ import annotations

import click

from headrace.wire import messages
from headrace_orchestrator.cli.output import connect, emit, json_option, note, number, service_options, shared, table

COLUMNS = ("run", "version", "learner", "waits on", "groups", "queued", "leased", "done", "failed", "reward")
"""Columns of the table. ``groups``: groups in flight. ``queued`` and ``leased``: current episodes, the latter with the
policy servers' capacity if known. ``done`` and ``failed``: numbers of ended episodes."""


def learner_state(run: messages.RunStatus) -> str:
    """The learner's activity in one word, or the state of a run that is over."""
    if run.state != "active":
        return run.state
    if run.learner_waiting:
        return "waiting"
    return "silent" if run.learner_silent and run.learner_doing != "gone" else run.learner_doing or "–"


def row(run: messages.RunStatus) -> list[str]:
    """Format a run as a row of ``COLUMNS``."""
    waits_on = ", ".join(reason.code for reason in run.reasons) if run.learner_waiting else ""
    ended = run.episodes.get("finished", 0) + run.episodes.get("truncated", 0)
    return [
        run.name,
        run.version,
        learner_state(run),
        waits_on or "–",
        str(run.in_flight),
        str(run.queued),
        str(run.leased) if run.attainable is None else f"{run.leased} of {run.attainable}",
        f"{ended} ({run.rowless} without rows)" if run.rowless else str(ended),
        str(run.episodes.get("failed", 0)),
        number(run.mean_reward),
    ]


PROBLEMS = ("no-rows", "policy-outdated", "prompts-differ", "workers-lost")
"""Codes of reasons that people have to act on, beside those that end with ``-failing``."""


def problems(run: messages.RunStatus) -> list[str]:
    """Sentences about what people have to act on, whether or not the learner waits, and about a weight sync in
    progress."""
    failing = [reason.message for reason in run.reasons if reason.code.endswith("-failing") or reason.code in PROBLEMS]
    return [*failing, run.weight_sync] if run.weight_sync else failing


@click.command(short_help="List all runs.")
@service_options
@json_option
def runs(url: str | None, token: str | None) -> None:
    """List all runs, with the activity of each learner and the reasons that it waits.

    `groups` counts groups in flight. `queued` and `leased` count current episodes, with the policy servers'
    capacity if known; `done` counts episodes that finished or used up a budget. `reward` is the mean of the last
    256 episodes. Problems that somebody has to act on are listed below the table.

    \b
    Example:
      headrace runs --json
    """
    with connect(url, token) as client:
        statuses = client.runs()
    if shared().json:
        emit(statuses)
    elif statuses:
        table(COLUMNS, [row(run) for run in statuses])
        for run in statuses:
            for problem in problems(run):
                note(f"{run.name}: {problem}")
    else:
        note("No runs yet. `headrace run --help` says how to make one.")

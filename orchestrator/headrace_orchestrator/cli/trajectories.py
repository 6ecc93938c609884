"""``headrace trajectories``: list stored episodes, and read one turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, get_args

import click
import msgspec

from headrace.errors import UnknownBatch
from headrace.runspec import read_run_spec
from headrace.trajectory import ContentPart, Message, Status, Trajectory, Turn, Version
from headrace.wire import messages as wire
from headrace_orchestrator.cli.output import (
    connect,
    emit,
    json_option,
    note,
    number,
    one_line,
    printable,
    service_options,
    shared,
    span,
    table,
)

COLUMNS = ("id", "environment", "status", "stop", "reward", "turns", "tokens", "versions", "age")

SPARE = ("tokens", "versions", "status")
"""Columns that a narrow terminal drops."""

DEFAULT_LIMIT = 50

SHOWN_IDS = 32
"""Number of a turn's last ids that a transcript shows if the environment got only a part of the turn."""


class TurnLine(NamedTuple):
    """A turn and its values. ``return_to_go``: discounted by γ per turn of the agent. ``advantage``: None
    without a batch, or if the segment is not trained on."""

    agent: str
    turn: Turn
    return_to_go: float
    advantage: float | None


@click.group()
def trajectories() -> None:
    """Show stored trajectories.

    \b
    Examples:
      headrace trajectories list guess --status failed
      headrace trajectories show ID
    """


@trajectories.command("list")
@click.argument("run")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only trajectories with this status.")
@click.option("--environment", help="Only trajectories of this environment.")
@click.option("--evaluation", help="Only trajectories of this evaluation.")
@click.option(
    "--limit",
    default=DEFAULT_LIMIT,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Most trajectories.",
)
@service_options
@json_option
def list_trajectories(
    run: str,
    status: Status | None,
    environment: str | None,
    evaluation: str | None,
    limit: int,
    url: str | None,
    token: str | None,
) -> None:
    """List trajectories of RUN, newest first.

    \b
    Example:
      headrace trajectories list guess --status failed --limit 10
    """
    with connect(url, token) as client:
        pages = client.trajectories(
            run, status=status, environment=environment, evaluation=evaluation, page=min(limit, 200)
        )
        summaries = list(islice(pages, limit))
    if shared().json:
        emit(summaries)
    elif summaries:
        table(COLUMNS, [_row(summary) for summary in summaries], spare=SPARE)
    else:
        note("No trajectories match.")


@trajectories.command("show")
@click.argument("trajectory")
@service_options
@json_option
def show(trajectory: str, url: str | None, token: str | None) -> None:
    """Print TRAJECTORY as a transcript, with reward, return-to-go and advantage after each turn.

    The return is discounted by the run's γ per turn. Advantages belong to a batch: they are shown once the trajectory
    has been put in one.

    \b
    Example:
      headrace trajectories show 0198c0de-0000-7000-8000-000000000000
    """
    with connect(url, token) as client:
        record = client.trajectory(trajectory)
        gamma = read_run_spec(client.run(record.run).spec).estimator.gamma
        try:
            batch = client.advantages(trajectory)
        except UnknownBatch:
            batch = None
    if shared().json:
        emit(_as_data(record, gamma, batch))
    else:
        _print(record, gamma, batch)


def turn_lines(trajectory: Trajectory, gamma: float, batch: wire.TrajectoryAdvantages | None) -> dict[int, TurnLine]:
    """The turns by index, with the return-to-go G_k = r_k + γ·G_{k+1} over the turns of the same agent."""
    advantages = _advantages_by_turn(trajectory, batch)
    lines: dict[int, TurnLine] = {}
    for agent in {segment.agent for segment in trajectory.segments}:
        return_to_go = 0.0
        for turn in reversed(trajectory.agent_turns(agent)):
            return_to_go = turn.reward + gamma * return_to_go
            lines[turn.index] = TurnLine(agent, turn, return_to_go, advantages.get(turn.index))
    return dict(sorted(lines.items()))


def _advantages_by_turn(trajectory: Trajectory, batch: wire.TrajectoryAdvantages | None) -> dict[int, float]:
    return {
        turn.index: advantage
        for row in (batch.rows if batch is not None else [])
        for turn, advantage in zip(trajectory.segments[row.segment].turns, row.advantages or [], strict=False)
    }


def _row(summary: wire.TrajectorySummary) -> list[str]:
    versions = summary.low if summary.low == summary.high else f"{summary.low}…{summary.high}"
    return [
        summary.id,
        summary.environment,
        summary.status,
        summary.failure.kind if summary.failure else summary.stop_reason,
        number(summary.reward),
        str(summary.turns),
        str(summary.row_tokens),
        versions or "–",
        span(summary.age_s),
    ]


def _as_data(trajectory: Trajectory, gamma: float, batch: wire.TrajectoryAdvantages | None) -> dict[str, Any]:
    """The readable part of a record, without its arrays, which the API serves. A turn includes its ids if the
    environment got only a part of it."""
    sampled = _sampled_ids(trajectory)
    data = {
        name: msgspec.to_builtins(getattr(trajectory, name))
        for name in trajectory.__struct_fields__
        if name != "segments"
    }
    data["gamma"] = gamma
    data["batch"] = batch.batch if batch is not None else None
    data["turns"] = [
        {
            "agent": line.agent,
            "return_to_go": line.return_to_go,
            "advantage": line.advantage,
            **msgspec.to_builtins(line.turn),
            **({"token_ids": sampled[line.turn.index]} if line.turn.said else {}),
        }
        for line in turn_lines(trajectory, gamma, batch).values()
    ]
    return data


def _print(trajectory: Trajectory, gamma: float, batch: wire.TrajectoryAdvantages | None) -> None:
    click.echo("\n".join(transcript(trajectory, gamma, batch)))


def transcript(trajectory: Trajectory, gamma: float, batch: wire.TrajectoryAdvantages | None) -> Iterator[str]:
    """The lines of a transcript, with escape codes for style, which a pipe does not get."""
    lines = turn_lines(trajectory, gamma, batch)
    versions = trajectory.version_range()
    policy = f", {_version_words(*versions)}" if versions else ""
    yield f"{_bold(trajectory.id)}  {one_line(trajectory.task.environment)}, seed {trajectory.task.seed}"
    turns = _count(len(lines), "turn")
    yield f"{trajectory.status} ({trajectory.stop_reason}), {turns}{policy}, γ = {gamma:g} per turn"
    if batch is not None:
        yield f"advantages by {batch.estimator} in batch {batch.batch}"
    else:
        yield "in no batch yet, so without advantages"
    if trajectory.failure is not None:
        failure = trajectory.failure
        kind = click.style(one_line(f"{failure.layer}: {failure.kind}"), fg="red")
        yield f"{kind} {printable(failure.message)}"
    if trajectory.control_tokens:
        spelled = _count(trajectory.control_tokens, "control token")
        text = f"Texts of the environment spelled {spelled} of the model; they were encoded as text."
        yield click.style(text, fg="yellow")
    sampled = _sampled_ids(trajectory)
    several = len({segment.agent for segment in trajectory.segments}) > 1
    for message in trajectory.messages:
        yield ""
        yield _bold(_speaker(message, several))
        yield printable(_text(message)) or click.style("(nothing)", dim=True)
        if message.turn in lines and message.role == "assistant":
            turn = lines[message.turn].turn
            if turn.said:
                yield click.style(printable(_sampled(turn, sampled[turn.index])), fg="yellow")
            yield click.style(one_line(_turn_values(lines[message.turn])), fg="cyan")


def _bold(text: str) -> str:
    return click.style(one_line(text), bold=True)


def _sampled_ids(trajectory: Trajectory) -> dict[int, list[int]]:
    """The sampled ids of each turn, by the turn's index."""
    return {
        turn.index: segment.token_ids[turn.start : turn.end].tolist()
        for segment in trajectory.segments
        for turn in segment.turns
    }


def _sampled(turn: Turn, ids: list[int]) -> str:
    """Format the sampled ids and text of a turn, if the environment got only a part of it."""
    shown = " ".join(map(str, ids[-SHOWN_IDS:]))
    ellipsis = "… " if len(ids) > SHOWN_IDS else ""
    return f"sampled {_count(len(ids), 'token')}: {ellipsis}{shown}\nas text: {turn.said!r}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _version_words(low: Version, high: Version) -> str:
    return f"version {low}" if low == high else f"versions {low} to {high}"


def _speaker(message: Message, several: bool) -> str:
    """The speaker of a message; with several agents, also the recipient."""
    if message.role == "assistant":
        turn = f" (turn {message.turn})" if message.turn >= 0 else ""
        return f"{message.agent or message.role}{turn}"
    return f"{message.role} to {message.agent}" if several and message.agent else message.role


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text if part.type == "text" else _image(part) for part in message.content)


def _image(part: ContentPart) -> str:
    """Format an image: its name, and its text for policies that read text only."""
    return f"<image {part.asset}>" + (f" as text: {part.text}" if part.text else "")


def _turn_values(line: TurnLine) -> str:
    turn = line.turn
    parts = ", ".join(f"{name} {number(value)}" for name, value in turn.reward_parts.items())
    end = ", terminated" if turn.terminated else ", truncated" if turn.truncated else ""
    breakdown = f" ({parts})" if parts else ""
    advantage = f", advantage {number(line.advantage)}" if line.advantage is not None else ""
    return (
        f"reward {number(turn.reward)}{breakdown}, return-to-go {number(line.return_to_go)}{advantage}, "
        f"{_count(turn.end - turn.start, 'token')}{end}"
    )

"""Episodes for a trainer that owns its prompts: it submits groups, and waits for those and no others.

* Episodes come in the order in which they were asked for, as many of each as were asked for.
* What cannot be had is an error that names the group; there is no gap.
* An episode is one row, cut where the policy's first token stands.
* Each turn's reward stands at the last token of the turn.

::

    (episodes,) = roll_out(client, "own", [PromptGroup({"environment": "math:Arithmetic-v0", "seed": 7}, 8)])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.batch.batch import Batch, Row
from headrace.client.operations import TaskLike, plain_task
from headrace.client.sync_client import Client
from headrace.errors import GroupIncomplete, HeadraceError, InvalidRequest
from headrace.wire import messages


class PromptGroup(NamedTuple):
    """So many episodes of a task, as one group."""

    task: TaskLike
    episodes: int


class EpisodeTokens(NamedTuple):
    """One episode as lists. ``prompt_ids`` end where the policy's first token stands; the others have one entry for
    each token from there on. ``mask`` is 1 where the policy sampled, ``logprobs`` and ``rewards`` are 0 elsewhere."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]
    temperature: float
    truncated: bool


def roll_out(
    client: Client, run: str, asked: Sequence[PromptGroup], *, timeout_s: float | None = None
) -> list[list[EpisodeTokens]]:
    """Submit a group for each, wait for all of them, and give the episodes of each.

    The batch is acked: a trainer that loses what it was given asks anew. Raises GroupEnded where a group cannot be
    served, GroupIncomplete where it has fewer episodes than were asked for, InvalidRequest where an episode is not one
    row, NothingToServe at the timeout.
    """
    if not asked:
        return []
    ids = client.submit_groups(
        run, [messages.GroupRequest(task=plain_task(one.task), size=one.episodes) for one in asked]
    )
    batch = client.pull(run, groups=ids, timeout_s=timeout_s)
    try:
        found = _by_group(batch)
        for id, one in zip(ids, asked, strict=True):
            _require_complete(id, len(found[id]), one.episodes)
    except HeadraceError as error:
        client.nack(batch, f"{error.code}: {error.detail}")
        raise
    client.ack(batch)
    return [found[id] for id in ids]


def group_sizes(keys: Sequence[Any], most: int) -> list[int]:
    """How many entries in a row are equal, at most so many at a time: the groups of a trainer that repeats each prompt
    for its generations. They add up to all entries."""
    found: list[int] = []
    for k, key in enumerate(keys):
        if found and key == keys[k - 1] and found[-1] < most:
            found[-1] += 1
        else:
            found.append(1)
    return found


def _by_group(batch: Batch) -> dict[str, list[EpisodeTokens]]:
    found: dict[str, list[EpisodeTokens]] = {group.id: [] for group in batch.manifest.groups}
    seen: set[str] = set()
    for row in batch.rows:
        if row.trajectory.id in seen:
            raise InvalidRequest(
                f"EpisodeTokens {row.trajectory.id} is several rows, of which this trainer takes one.",
                hint="Its history was edited, or several of its agents train. Let one agent train, keep its history, "
                "or use a trainer that pulls batches.",
            )
        seen.add(row.trajectory.id)
        found[row.group.id].append(_episode(row))
    return found


def _episode(row: Row) -> EpisodeTokens:
    first = row.turns[0].start
    rewards = [0.0] * (len(row.token_ids) - first)
    for turn in row.turns:
        rewards[turn.end - 1 - first] += turn.reward
    return EpisodeTokens(
        prompt_ids=row.token_ids[:first].tolist(),
        response_ids=row.token_ids[first:].tolist(),
        mask=row.sampled[first:].tolist(),
        logprobs=row.logprobs[first:].tolist(),
        rewards=rewards,
        temperature=row.temperature,
        truncated=row.trajectory.status == "truncated",
    )


def _require_complete(id: str, there: int, wanted: int) -> None:
    if there != wanted:
        raise GroupIncomplete(
            f"Group {id} has {there} of the {wanted} episodes that were asked for.",
            hint="The others failed for good, or have nothing to train on; headrace trajectories list RUN --status "
            "failed shows them.",
            group=id,
            episodes=there,
            wanted=wanted,
        )

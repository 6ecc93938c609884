"""Episodes for a trainer that owns its prompts: it submits groups and waits for exactly these.

* Episodes are returned in the order of the groups, as many of each as requested.
* An incomplete group raises an error that names it; no episode is omitted silently.
* An episode is one row, split at the policy's first token.
* The reward of a turn is at its last token.

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
from headrace.integrations.trainer_sampling import require_sampled_logprobs
from headrace.wire import messages


class PromptGroup(NamedTuple):
    """A request for a group: a task, and the number of its episodes."""

    task: TaskLike
    episodes: int


class EpisodeTokens(NamedTuple):
    """An episode as lists. ``prompt_ids`` end before the policy's first token; the other lists have one entry for each
    token from there on. ``mask`` is 1 where the policy sampled; ``logprobs`` and ``rewards`` are 0 elsewhere."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]
    temperature: float
    truncated: bool


def roll_out(
    client: Client, run: str, groups: Sequence[PromptGroup], *, timeout_s: float | None = None
) -> list[list[EpisodeTokens]]:
    """Submit the groups, wait for all of them, and return the episodes of each.

    The batch is acked: a trainer that loses the episodes must request them again. Raises GroupEnded if a group cannot
    be served, GroupIncomplete if it has fewer episodes than requested, InvalidRequest if an episode is not one row or
    its logprobs are not those of the sampled distribution, NothingToServe at the timeout.
    """
    if not groups:
        return []
    ids = client.submit_groups(
        run, [messages.GroupRequest(task=plain_task(group.task), size=group.episodes) for group in groups]
    )
    batch = client.pull(run, groups=ids, timeout_s=timeout_s)
    try:
        episodes = _by_group(batch)
        for id, group in zip(ids, groups, strict=True):
            _require_complete(id, len(episodes[id]), group.episodes)
    except HeadraceError as error:
        client.nack(batch, f"{error.code}: {error.detail}")
        raise
    client.ack(batch)
    return [episodes[id] for id in ids]


def group_sizes(keys: Sequence[Any], most: int) -> list[int]:
    """Sizes of runs of equal consecutive keys, at most ``most`` each; their sum is the number of keys.

    These are the groups of a trainer that repeats each prompt for its generations.
    """
    sizes: list[int] = []
    for k, key in enumerate(keys):
        if sizes and key == keys[k - 1] and sizes[-1] < most:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def _by_group(batch: Batch) -> dict[str, list[EpisodeTokens]]:
    groups: dict[str, list[EpisodeTokens]] = {group.id: [] for group in batch.manifest.groups}
    ids: set[str] = set()
    for row in batch.rows:
        if row.trajectory.id in ids:
            raise InvalidRequest(
                f"Episode {row.trajectory.id} has several rows, but this trainer takes only one.",
                hint="Its history was edited, or several of its agents train. Train one agent without history edits, "
                "or use a trainer that pulls batches.",
            )
        require_sampled_logprobs(row)
        ids.add(row.trajectory.id)
        groups[row.group.id].append(_episode(row))
    return groups


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


def _require_complete(id: str, actual: int, requested: int) -> None:
    if actual != requested:
        raise GroupIncomplete(
            f"Group {id} has {actual} of the {requested} requested episodes.",
            hint="The others failed permanently, or have no tokens to train on. `headrace trajectories list RUN "
            "--status failed` lists the failed ones.",
            group=id,
            episodes=actual,
            wanted=requested,
        )

"""Episodes for a trainer that owns its prompts: it submits groups and waits for exactly these.

* Episodes are returned in the order of the groups, as many of each as requested.
* A group that ends or has too few episodes costs the others nothing; its reason is returned beside them.
* An episode is one row, split at the policy's first token.
* The reward of a turn is at its last token.

::

    rolled = roll_out(client, "own", [PromptGroup({"environment": "math:Arithmetic-v0", "seed": 7}, 8)])
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.batch.batch import Batch, Row
from headrace.client.operations import TaskLike, plain_task
from headrace.client.sync_client import Client
from headrace.errors import GroupEnded, GroupIncomplete, HeadraceError, InvalidRequest, NothingToServe
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


class RolledOut(NamedTuple):
    """Episodes of groups. ``episodes``: those of each group, in the order of the groups; none for a group that will not
    be served. ``failures``: the reasons why groups are not served, or have too few episodes, by their index."""

    episodes: list[list[EpisodeTokens]]
    failures: dict[int, str]


def roll_out(client: Client, run: str, groups: Sequence[PromptGroup], *, timeout_s: float | None = None) -> RolledOut:
    """Submit the groups, wait until each is complete or over, and return their episodes.

    The batch is acked: a trainer that loses the episodes must request them again. Raises GroupEnded if no group can be
    served, InvalidRequest if an episode is not one row or its logprobs are not those of the sampled distribution, and
    NothingToServe at the timeout, whose ``extra["groups"]`` lists the ids of the groups.
    """
    if not groups:
        return RolledOut([], {})
    ids = client.submit_groups(
        run, [messages.GroupRequest(task=plain_task(group.task), size=group.episodes) for group in groups]
    )
    batch, ended = _pull_all(client, run, ids, timeout_s)
    try:
        episodes = _by_group(batch)
    except HeadraceError as error:
        client.nack(batch, f"{error.code}: {error.detail}")
        raise
    client.ack(batch)
    failures: dict[int, str] = {}
    for index, (id, group) in enumerate(zip(ids, groups, strict=True)):
        if id in ended:
            failures[index] = ended[id]
        elif len(episodes[id]) != group.episodes:
            failures[index] = f"Group {id} has {len(episodes[id])} of the {group.episodes} requested episodes."
    return RolledOut([episodes.get(id, []) for id in ids], failures)


def require_complete(rolled: RolledOut) -> list[list[EpisodeTokens]]:
    """The episodes, for a trainer that takes all or none. Raises GroupIncomplete."""
    if rolled.failures:
        raise GroupIncomplete(
            " ".join(rolled.failures.values()),
            hint="The others failed permanently, or have no tokens to train on. `headrace trajectories list RUN "
            "--status failed` lists the failed ones.",
            failures=rolled.failures,
        )
    return rolled.episodes


def _pull_all(client: Client, run: str, ids: list[str], timeout_s: float | None) -> tuple[Batch, dict[str, str]]:
    """The batch of all groups that can be served, and the reasons why the others cannot, by id. Raises GroupEnded if
    there is none."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ended: dict[str, str] = {}
    left = ids
    while True:
        try:
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            return client.pull(run, groups=left, timeout_s=remaining_s), ended
        except GroupEnded as error:
            ended |= error.extra["ended"]
            left = error.extra["left"]
            if not left:
                error.extra["ended"] = ended
                raise
        except NothingToServe as error:
            error.extra["groups"] = ids
            raise


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

"""Samples for TRL's asynchronous GRPO trainer, from the rows of a batch.

* A sample has one advantage, at its own sampled tokens; a row whose turns differ becomes one sample for each turn.
* Mask and logprobs have the length of the tokens, and are 0 where nothing was sampled.
* The version of a sample is that of its oldest token, in the trainer's count of versions.
* A row that the trainer would silently misinterpret is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.batch.batch import Batch, Row, as_float32
from headrace.errors import InvalidRequest
from headrace.integrations.trainer_sampling import require_sampled_logprobs
from headrace.layouts import TurnRow, split_turns
from headrace.trajectory import Message, Trajectory


@dataclass(slots=True, eq=False)
class RolloutSample:
    """A class with the fields of TRL's class of the same name, which the trainer reads by name.

    Arrays have the shape [tokens]: ``input_ids`` and ``completion_mask`` i64, ``old_log_probs`` f32. ``enqueued_at`` is
    Unix time in seconds, as in TRL.
    """

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


def samples(batch: Batch, *, first_version: int, first_group: int, now_s: float) -> Iterator[RolloutSample]:
    """The samples of a batch, in the order of its rows.

    ``first_version``: the ``n`` of the version that the trainer counts as 0. ``first_group``: the number of the batch's
    first group; the others follow. Raises InvalidRequest for a row that the trainer cannot use, and with estimator
    ``none``.
    """
    numbers = {group.id: first_group + k for k, group in enumerate(batch.manifest.groups)}
    for row in batch.rows:
        _require_readable(row)
        prompt, completion = _messages(row.trajectory)
        version = min(run.n for run in row.versions) - first_version
        for part in _parts(row):
            yield RolloutSample(
                prompt=prompt,
                completion=completion,
                input_ids=part.token_ids.astype(np.int64),
                completion_mask=part.sampled.astype(np.int64),
                old_log_probs=part.logprobs.astype(np.float32),
                advantage=float(as_float32(part.advantages)[0]),
                model_version=version,
                group_id=numbers[row.group.id],
                metrics={"reward": episode_reward(row.trajectory)},
                enqueued_at=now_s,
            )


def episode_reward(trajectory: Trajectory) -> float:
    """The sum of rewards over the turns of agents that train."""
    return float(sum(turn.reward for segment in trajectory.rows() for turn in segment.turns))


def _parts(row: Row) -> list[Row] | list[TurnRow]:
    alike = bool(np.all(row.advantages == row.advantages[0]))
    return [row] if alike else split_turns([row])


def _require_readable(row: Row) -> None:
    if row.sampled[0]:
        raise InvalidRequest(
            f"Row {row.index} samples its first token, which TRL omits because it has no context.",
            hint="Give each episode a prompt, if only a beginning-of-text token.",
        )
    require_sampled_logprobs(row)


def _messages(trajectory: Trajectory) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The messages before the policy's first turn, and the others; only for traces."""
    plain = [_message(message) for message in trajectory.messages]
    first = next((k for k, message in enumerate(trajectory.messages) if message.turn >= 0), len(plain))
    return plain[:first], plain[first:]


def _message(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": message.role, "content": text}

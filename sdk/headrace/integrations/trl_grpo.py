"""``rollout_func`` for TRL's ``GRPOTrainer``, which owns its prompts (trl 1.16).

* The repetitions of a prompt are one group, and each returns one row.
* Before the first groups of a step its weights are written and announced; no group is sampled on older weights.
* Sampling parameters of the trainer other than the run's are refused, since a run samples by its spec.
* An incomplete group ends the trainer with a typed error; no episode is omitted silently.

::

    weights = WeightFolder("model", "/shared/weights")
    trainer = GRPOTrainer(
        "model",
        reward_funcs=headrace_reward,
        rollout_func=rollout_func(client, "own", lambda prompt: {"environment": "math:Arithmetic-v0"}, weights=weights),
        ...
    )

TRL is not imported; attributes of the trainer are read by name. For one process, or data parallelism without sharded
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.client.operations import TaskLike
from headrace.client.sync_client import Client
from headrace.errors import InvalidRequest
from headrace.integrations.prompts import EpisodeTokens, PromptGroup, group_sizes, require_complete, roll_out
from headrace.integrations.trainer_sampling import require_run_sampling
from headrace.integrations.weight_folder import WeightFolder
from headrace.trajectory import Version

__all__ = ["WeightFolder", "headrace_reward", "rollout_func"]

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""A function of the prompts and the trainer, which returns one completion for each prompt."""


def rollout_func(
    client: Client,
    run: str,
    task: Callable[[Any], TaskLike],
    *,
    weights: WeightFolder | None = None,
    timeout_s: float | None = None,
) -> RolloutFunc:
    """A ``rollout_func`` for the trainer.

    ``task(prompt)`` returns the task of a prompt. ``weights``: the folder for the weights of each step; None: the
    trainer loads them into the servers itself. ``timeout_s``: that of ``Client.pull``.

    Raises InvalidRequest for a run that allows staleness, because the trainer assumes that its current weights sampled
    all episodes. The function raises the errors of ``roll_out``, GroupIncomplete, and InvalidRequest if the
    trainer's configuration requests other sampling parameters than the run's.
    """
    spec = client.run(run).spec
    bound = spec["max_staleness"]
    if bound:
        raise InvalidRequest(
            f"Run {run!r} has max_staleness {bound}, but GRPOTrainer cannot train on episodes of older weights.",
            hint="Set max_staleness of the run to 0.",
        )
    steps = _Steps(client, run, weights)

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        require_run_sampling("GRPOConfig", vars(trainer.args), run, spec["sampling"])
        steps.reach(trainer)
        training = trainer.model.training
        group_size = trainer.num_generations if training else trainer.num_generations_eval
        requested, start = [], 0
        for size in group_sizes(prompts, group_size):
            requested.append(PromptGroup(task(prompts[start]), size))
            start += size
        groups = require_complete(roll_out(client, run, requested, timeout_s=timeout_s))
        return _output([episode for group in groups for episode in group])

    return roll


def headrace_reward(reward: list[float], **_: Any) -> list[float]:
    """The reward function for the trainer: the sum of each episode's environment rewards."""
    return reward


def _output(episodes: list[EpisodeTokens]) -> dict[str, Any]:
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.response_ids for episode in episodes],
        "logprobs": [episode.logprobs for episode in episodes],
        "env_mask": [episode.mask for episode in episodes],
        "reward": [sum(episode.rewards) for episode in episodes],
    }


class _Steps:
    """Keeps the run's policy servers at the trainer's step. A run without staleness samples nothing on older
    weights."""

    def __init__(self, client: Client, run: str, weights: WeightFolder | None) -> None:
        self._client, self._run, self._weights = client, run, weights
        self._step: int | None = None

    def reach(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if self._weights is None or step == self._step:
            return
        if trainer.accelerator.is_main_process:
            model = trainer.accelerator.unwrap_model(trainer.model)
            folder = self._weights.write(model.named_parameters())
            now = Version.parse(self._client.run(self._run).version)
            self._client.announce(self._run, Version(now.lineage, now.n + 1), weights=folder)
        trainer.accelerator.wait_for_everyone()
        self._step = step

"""TRL's ``GRPOTrainer``, which owns its prompts: its ``rollout_func`` plays them with Headrace (trl 1.16).

* The repetitions of a prompt are one group; one row comes back for each.
* Before the first groups of a step its weights are written and announced; no group is played on older ones.
* What cannot be had ends the trainer with a typed error; there is no gap.

::

    weights = WeightFolder("model", "/shared/weights")
    trainer = GRPOTrainer(
        "model",
        reward_funcs=headrace_reward,
        rollout_func=rollout_func(client, "own", lambda prompt: {"environment": "math:Arithmetic-v0"}, weights=weights),
        ...
    )

TRL is not imported here: the trainer is asked by name for what it is at. For one process or data parallelism without
sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.client.operations import TaskLike
from headrace.client.sync_client import Client
from headrace.errors import InvalidRequest
from headrace.integrations.prompts import EpisodeTokens, PromptGroup, group_sizes, roll_out
from headrace.integrations.weight_folder import WeightFolder
from headrace.trajectory import Version

__all__ = ["WeightFolder", "headrace_reward", "rollout_func"]

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""From prompts and the trainer to one completion for each prompt."""


def rollout_func(
    client: Client,
    run: str,
    task: Callable[[Any], TaskLike],
    *,
    weights: WeightFolder | None = None,
    timeout_s: float | None = None,
) -> RolloutFunc:
    """``task(prompt)`` gives the task of a prompt. ``weights``: where those of each step are written; without, the
    trainer's own way of loading them into the servers counts. ``timeout_s``: as of ``Client.pull``.

    Raises InvalidRequest for a run that allows staleness: the trainer takes all that it is given as sampled by its own
    weights. The function raises what ``roll_out`` raises.
    """
    bound = client.run(run).spec["max_staleness"]
    if bound:
        raise InvalidRequest(
            f"Run {run!r} allows a max_staleness of {bound}; GRPOTrainer takes no episode for older than its weights.",
            hint="Give the run max_staleness 0.",
        )
    steps = _Steps(client, run, weights)

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        steps.reach(trainer)
        training = trainer.model.training
        most = trainer.num_generations if training else trainer.num_generations_eval
        asked, start = [], 0
        for size in group_sizes(prompts, most):
            asked.append(PromptGroup(task(prompts[start]), size))
            start += size
        groups = roll_out(client, run, asked, timeout_s=timeout_s)
        return _output([episode for group in groups for episode in group])

    return roll


def headrace_reward(reward: list[float], **_: Any) -> list[float]:
    """The reward function for the trainer: the sum of each episode's rewards, as its environment gave them."""
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
    """Keeps the run's policy servers at the trainer's step. A run without staleness plays nothing before they are."""

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

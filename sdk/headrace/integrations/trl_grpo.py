"""TRL's ``GRPOTrainer``, which owns its prompts: its ``rollout_func`` plays them with Headrace (trl 1.16).

* The repetitions of a prompt are one group; one row comes back for each.
* Before the first groups of a step the weights are written, announced, and waited for until they are in use.
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
sharded parameters. The trainer takes what it is given as sampled by its own weights, so let the run's
``max_staleness`` be 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace._flows import TaskLike
from headrace.client import Client
from headrace.errors import Unavailable
from headrace.integrations._weights import WeightFolder
from headrace.integrations.prompts import Asked, Episode, roll_out, sizes
from headrace.trajectory import Version

__all__ = ["WeightFolder", "headrace_reward", "rollout_func"]

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""From prompts and the trainer to one completion for each prompt."""

SERVED_WITHIN_S = 600.0
"""Until some server serves new weights; large models take minutes to load."""

POLL_S = 20.0


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

    The function raises what ``roll_out`` raises, and Unavailable where no server takes the weights.
    """
    steps = _Steps(client, run, weights)

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        steps.reach(trainer)
        training = trainer.model.training
        most = trainer.num_generations if training else trainer.num_generations_eval
        asked, start = [], 0
        for size in sizes(prompts, most):
            asked.append(Asked(task(prompts[start]), size))
            start += size
        groups = roll_out(client, run, asked, timeout_s=timeout_s)
        return _output([episode for group in groups for episode in group])

    return roll


def headrace_reward(reward: list[float], **_: Any) -> list[float]:
    """The reward function for the trainer: the sum of each episode's rewards, as its environment gave them."""
    return reward


def _output(episodes: list[Episode]) -> dict[str, Any]:
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.response_ids for episode in episodes],
        "logprobs": [episode.logprobs for episode in episodes],
        "env_mask": [episode.mask for episode in episodes],
        "reward": [sum(episode.rewards) for episode in episodes],
    }


class _Steps:
    """Keeps the run's policy servers at the trainer's step."""

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
            version = Version(now.lineage, now.n + 1)
            self._client.announce(self._run, version, weights=folder)
            self._wait_for(version)
        trainer.accelerator.wait_for_everyone()
        self._step = step

    def _wait_for(self, version: Version) -> None:
        """Until the run's servers sample with it. Without servers of its own it is its workers' affair."""
        deadline = time.monotonic() + SERVED_WITHIN_S
        revision = None
        while True:
            reply = self._client.servers(self._run, revision=revision, wait_s=POLL_S)
            wanted = [server for server in reply.servers if server.state not in ("draining", "ejected")]
            behind = [
                server
                for server in wanted
                if server.state != "serving" or not server.version or Version.parse(server.version) < version
            ]
            if not behind and (wanted or not reply.servers):
                return
            if time.monotonic() > deadline:
                states = ", ".join(f"{server.address}: {server.state} {server.version}" for server in reply.servers)
                raise Unavailable(
                    f"Version {version} of run {self._run!r} is not in use after {SERVED_WITHIN_S:g} s ({states}). "
                    f"{reply.sync}".rstrip(),
                    hint="headrace servers RUN shows what each policy server is at.",
                )
            revision = reply.revision

"""SkyRL's generator interface: the trainer submits prompts, and Headrace runs the episodes.

* Episodes are returned in the order of the prompts; the repetitions of a prompt are one group.
* Rewards are per token: the reward of a turn is at its last token.
* Sampling parameters other than the run's are refused, since a run samples by its spec.

::

    generator = HeadraceGenerator(client, "own", lambda name, extras, prompt: {"environment": name, "example": extras})

SkyRL is not imported; the interface is that of ``skyrl.train.generators.base`` of August 2026. SkyRL itself loads the
weights: the run's policy servers are its inference engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace.bounds import MAX_COUNT
from headrace.client.operations import TaskLike
from headrace.client.sync_client import Client
from headrace.integrations.prompts import EpisodeTokens, PromptGroup, group_sizes, require_complete, roll_out
from headrace.integrations.trainer_sampling import require_run_sampling


class HeadraceGenerator:
    """A generator for SkyRL. ``task(env_class, env_extras, prompt)`` returns the task of a prompt; ``timeout_s`` is
    that of ``Client.pull``."""

    def __init__(
        self,
        client: Client,
        run: str,
        task: Callable[[str, Mapping[str, Any], Any], TaskLike],
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._client, self._run, self._task, self._timeout_s = client, run, task, timeout_s

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The ``GeneratorOutput`` for a ``GeneratorInput``. Raises the errors of ``roll_out``, and GroupIncomplete."""
        return await asyncio.to_thread(self._generate, input_batch)

    def _generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        used = self._client.run(self._run).spec["sampling"]
        require_run_sampling("SkyRL", input_batch.get("sampling_params") or {}, self._run, used)
        prompts, names = input_batch["prompts"], input_batch["env_classes"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        ids = input_batch.get("trajectory_ids")
        keys = prompts if ids is None else [id.instance_id for id in ids]
        requested, start = [], 0
        for size in group_sizes(keys, MAX_COUNT):
            requested.append(PromptGroup(self._task(names[start], extras[start], prompts[start]), size))
            start += size
        groups = require_complete(roll_out(self._client, self._run, requested, timeout_s=self._timeout_s))
        return {**_output([episode for group in groups for episode in group]), "trajectory_ids": ids}


def _output(episodes: list[EpisodeTokens]) -> dict[str, Any]:
    return {
        "prompt_token_ids": [episode.prompt_ids for episode in episodes],
        "response_ids": [episode.response_ids for episode in episodes],
        "rewards": [episode.rewards for episode in episodes],
        "loss_masks": [episode.mask for episode in episodes],
        "stop_reasons": ["length" if episode.truncated else "stop" for episode in episodes],
        "rollout_metrics": None,
        "rollout_logprobs": [episode.logprobs for episode in episodes],
    }

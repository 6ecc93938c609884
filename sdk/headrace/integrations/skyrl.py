"""SkyRL's generator interface: the trainer gives prompts, Headrace plays the episodes.

* Episodes come in the order of the prompts; the repetitions of a prompt are one group.
* Rewards are per token: each turn's stands at its last token.
* A temperature that is not the run's is refused: a run samples as its spec says.

::

    generator = HeadraceGenerator(client, "own", lambda name, extras, prompt: {"environment": name, "example": extras})

SkyRL is not imported here; the interface is that of ``skyrl.train.generators.base`` of August 2026. Weights are
SkyRL's own to load: the run's policy servers are its inference engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace.client.operations import TaskLike
from headrace.client.sync_client import Client
from headrace.errors import InvalidRequest
from headrace.integrations.prompts import EpisodeTokens, PromptGroup, group_sizes, roll_out
from headrace.runspec import MAX_COUNT


class HeadraceGenerator:
    """``task(env_class, env_extras, prompt)`` gives the task of a prompt. ``timeout_s``: as of ``Client.pull``."""

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
        """A ``GeneratorOutput`` for a ``GeneratorInput``. Raises what ``roll_out`` raises."""
        return await asyncio.to_thread(self._generate, input_batch)

    def _generate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._require_temperature(given.get("sampling_params") or {})
        prompts, names = given["prompts"], given["env_classes"]
        extras = given.get("env_extras") or [{}] * len(prompts)
        ids = given.get("trajectory_ids")
        keys = prompts if ids is None else [id.instance_id for id in ids]
        asked, start = [], 0
        for size in group_sizes(keys, MAX_COUNT):
            asked.append(PromptGroup(self._task(names[start], extras[start], prompts[start]), size))
            start += size
        groups = roll_out(self._client, self._run, asked, timeout_s=self._timeout_s)
        return {**_output([episode for group in groups for episode in group]), "trajectory_ids": ids}

    def _require_temperature(self, sampling: Mapping[str, Any]) -> None:
        asked = sampling.get("temperature")
        used = self._client.run(self._run).spec["sampling"]["temperature"]
        if asked is not None and asked != used:
            raise InvalidRequest(
                f"SkyRL asks for temperature {asked:g}; run {self._run!r} samples at {used:g}.",
                hint="Give both the same. For an evaluation at another temperature there is Client.evaluate.",
            )


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

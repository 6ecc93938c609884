"""The tiny policy as an object: weights with a version, and answers to prompts. No I/O.

* New weights come with their version and replace the old ones in one step.
* The same seed and prompt give the same answer, independent of other requests.
* Without a seed, answers come from the policy's own generator.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from headrace.trajectory import Version
from headrace_workers.tiny_policy.model import Floats, Model, choice_for, neutral_weights
from headrace_workers.tiny_policy.sampler import Generation, SamplerSettings, WeightedAnswers
from headrace_workers.tiny_policy.situations import Situation, prompt_text, read_situation

MAX_CACHED_SITUATIONS = 8192
"""Situations cached per version; the intervals within 1 to 50 are 1275."""

INITIAL_VERSION = Version(0, 0)


class _Loaded(NamedTuple):
    model: Model
    version: Version
    answers: dict[Situation, WeightedAnswers]


class TinyPolicy:
    """A policy that answers prompts with the weights loaded last."""

    def __init__(self, seed: int = 0, weights: Floats | None = None, version: Version = INITIAL_VERSION) -> None:
        self._rng = random.Random(seed)
        self.load(neutral_weights() if weights is None else weights, version)

    @property
    def version(self) -> Version:
        """Version of the weights in use."""
        return self._loaded.version

    @property
    def model(self) -> Model:
        """The model of the weights in use."""
        return self._loaded.model

    @property
    def weights(self) -> Floats:
        """Weights in use, f64[SIZE]."""
        return self._loaded.model.weights

    def load(self, weights: Floats, version: Version) -> None:
        """Use these weights from now on. Raises InvalidRequest, and changes nothing, if their size is wrong."""
        self._loaded = _Loaded(Model(weights), version, {})

    def generate(
        self, prompt: Sequence[int], sampling: SamplerSettings, *, count: int = 1, seed: int | None = None
    ) -> tuple[list[Generation], Version]:
        """Sample ``count`` answers to one prompt, with their version. Answer i of a seed is always the same."""
        text = prompt_text(prompt)
        loaded = self._loaded
        situation = read_situation(text)
        answers = loaded.answers.get(situation)
        if answers is None:
            if len(loaded.answers) >= MAX_CACHED_SITUATIONS:
                loaded.answers.clear()
            answers = loaded.answers[situation] = WeightedAnswers(choice_for(situation), loaded.model.weights)
        # The prompt is part of the seed, so an episode that sends the same seed at every turn gets different answers.
        seeded = None if seed is None else (zlib.crc32(text.encode()) << 64) ^ (seed & (1 << 64) - 1)
        generations = []
        for index in range(count):
            rng = self._rng if seeded is None else random.Random((index << 96) ^ seeded)
            generations.append(answers.sample(sampling, rng))
        return generations, loaded.version

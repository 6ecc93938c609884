"""Sampling from a choice of answers, byte by byte, as an engine would.

* The probability of each byte is the mass of the answers that continue with it, over the mass of the remaining answers.
* Temperature, then min_p, top_k and top_p apply to each byte; temperature 0 is greedy, and picks the lowest id of
  equally likely ones.
* Log-probabilities are raw: those of the policy itself, before temperature and filters, as vLLM reports by default.
* Ids, text and log-probabilities end together: the token that ends a turn or completes a stop string is the last one.
* The text does not include the end-of-turn token, a stop token, or a stop string.
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from headrace_workers.renderers.bytes_renderer import BOS, END
from headrace_workers.tiny_policy.model import Floats, PossibleAnswers


class SamplerSettings(NamedTuple):
    """Sampling parameters, with vLLM's names and meanings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()


NEUTRAL = SamplerSettings()[:4]
"""Temperature and filters that leave the policy's own distribution."""


class Generation(NamedTuple):
    """A sampled answer. ``logprobs[i]`` is that of ``token_ids[i]``."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    stop_reason: int | str | None


class WeightedAnswers:
    """Distribution over the possible answers under given weights."""

    def __init__(self, choice: PossibleAnswers, weights: Floats) -> None:
        logits = choice.logits(weights)
        masses = np.exp(logits - logits.max())
        self._masses: list[float] = (masses / masses.sum()).tolist()
        self._ids = [(*text, END) for text in choice.texts]
        self._cumulative = list(accumulate(self._masses))
        self._logprobs_of: dict[int, list[float]] = {}

    def sample(self, sampling: SamplerSettings, rng: random.Random) -> Generation:
        """Draw one answer and apply the stop conditions of ``sampling``."""
        answer = self._draw(sampling, rng)
        return end_generation(self._ids[answer], self._logprobs(answer), sampling)

    def _draw(self, sampling: SamplerSettings, rng: random.Random) -> int:
        if sampling.temperature == 0:
            return self._greedy
        if sampling[:4] == NEUTRAL:
            drawn = bisect_right(self._cumulative, rng.random() * self._cumulative[-1])
            return min(drawn, len(self._ids) - 1)
        possible = list(range(len(self._ids)))
        for position in count():
            branches = self._branches(possible, position)
            if len(branches) > 1:
                tempered = _tempered({token: mass for token, (mass, _) in branches.items()}, sampling)
                token = rng.choices(list(tempered), list(tempered.values()))[0]
            else:
                token = next(iter(branches))
            possible = branches[token][1]
            if token == END:
                break
        return possible[0]

    @functools.cached_property
    def _greedy(self) -> int:
        possible = list(range(len(self._ids)))
        for position in count():
            branches = self._branches(possible, position)
            token = min(branches, key=lambda token: (-branches[token][0], token))
            possible = branches[token][1]
            if token == END:
                break
        return possible[0]

    def _logprobs(self, answer: int) -> list[float]:
        cached = self._logprobs_of.get(answer)
        if cached is not None:
            return cached
        logprobs = []
        possible = list(range(len(self._ids)))
        total = math.fsum(self._masses)
        for position, token in enumerate(self._ids[answer]):
            branches = self._branches(possible, position)
            mass, possible = branches[token]
            logprobs.append(0.0 if len(branches) == 1 else min(0.0, math.log(mass / total)))
            total = mass
        self._logprobs_of[answer] = logprobs
        return logprobs

    def _branches(self, possible: list[int], position: int) -> dict[int, tuple[float, list[int]]]:
        """Group the answers by their next token; return the mass and the answers of each group."""
        by_token: dict[int, list[int]] = {}
        for answer in possible:
            by_token.setdefault(self._ids[answer][position], []).append(answer)
        return {
            token: (math.fsum(self._masses[answer] for answer in answers), answers)
            for token, answers in by_token.items()
        }


def end_generation(ids: Sequence[int], logprobs: Sequence[float], sampling: SamplerSettings) -> Generation:
    """Cut ids, log-probabilities and text at the first stop condition that is met."""
    text = bytearray()
    stops = [stop.encode() for stop in sampling.stop]
    for length, token in enumerate(ids, start=1):
        if token in sampling.stop_token_ids:
            return _generation(ids, logprobs, length, text, "stop", token)
        if token == END:
            return _generation(ids, logprobs, length, text, "stop", None)
        if token < BOS:
            text.append(token)
        for stop in stops:
            if stop and text.endswith(stop):
                return _generation(ids, logprobs, length, text[: -len(stop)], "stop", stop.decode())
        if length == sampling.max_tokens:
            return _generation(ids, logprobs, length, text, "length", None)
    return _generation(ids, logprobs, len(ids), text, "length", None)


def _generation(
    ids: Sequence[int],
    logprobs: Sequence[float],
    length: int,
    text: bytearray,
    finish_reason: str,
    stop_reason: int | str | None,
) -> Generation:
    return Generation(
        list(ids[:length]), list(logprobs[:length]), text.decode(errors="replace"), finish_reason, stop_reason
    )


def _tempered(masses: dict[int, float], sampling: SamplerSettings) -> dict[int, float]:
    highest = max(masses.values())
    powers = {token: (mass / highest) ** (1 / sampling.temperature) for token, mass in masses.items()}
    best_first = sorted(powers, key=lambda token: (-powers[token], token))
    if sampling.top_k > 0:
        best_first = best_first[: sampling.top_k]
    best_first = [token for token in best_first if powers[token] >= sampling.min_p]
    kept: dict[int, float] = {}
    kept_mass = sampling.top_p * math.fsum(powers[token] for token in best_first)
    for token in best_first:
        kept[token] = powers[token]
        if math.fsum(kept.values()) >= kept_mass:
            break
    return kept

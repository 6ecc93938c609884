r"""The model: a softmax over the possible answers to a situation; pure numpy.

* Weights are one flat float64 vector; all zeros is version 0.0, which answers uniformly.
* Log-probabilities are those of an autoregressive policy over bytes: an answer's tokens sum to its log-probability.
* A byte without an alternative is forced and has log-probability exactly 0.
* The gradient of ``log_prob`` is exact.

Layout of the vector, in this order:

=============  ======================  =========================================================================
part           count                   meaning
=============  ======================  =========================================================================
``GUESS``      ``BUMPS``               height of each bump over the relative position of a guess in its interval
``NIM``        6**3 * 15               logit of each move (heap, count) in each position of three heaps up to 5
``SUM``        10 * 10 * 19            logit of each answer 0..18 to each sum of two digits
``OTHER``      19                      logit of each answer 0..18 to any other arithmetic
``UNKNOWN``    2                       logit of an empty answer, and of ``ok``
=============  ======================  =========================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest
from headrace_workers.renderers.bytes_renderer import END
from headrace_workers.tiny_policy.situations import (
    Guess,
    Heaps,
    OtherArithmetic,
    Situation,
    Sum,
    prompt_text,
    read_situation,
)

Floats = npt.NDArray[np.float64]
PromptOrSituation = Sequence[int] | npt.NDArray[np.int32]

BUMPS = 17
"""Bumps over the interval, evenly spaced from end to end; an odd number, so one is in the middle."""

BUMP_WIDTH = 0.08
"""Standard deviation of a bump, relative to the interval: a little more than their distance, so they overlap."""

NIM_HEAPS, NIM_SIZE = 3, 5
_NIM_MOVES = NIM_HEAPS * NIM_SIZE
_SUMS = 19

GUESS = slice(0, BUMPS)
NIM = slice(GUESS.stop, GUESS.stop + (NIM_SIZE + 1) ** NIM_HEAPS * _NIM_MOVES)
SUM = slice(NIM.stop, NIM.stop + 10 * 10 * _SUMS)
OTHER = slice(SUM.stop, SUM.stop + _SUMS)
UNKNOWN_PROMPT = slice(OTHER.stop, OTHER.stop + 2)
SIZE = UNKNOWN_PROMPT.stop
"""Length of the weight vector."""

MAX_INTERVAL = 1000
"""Widest interval with an answer for each number; in a wider one the policy uses the middle part."""


class PossibleAnswers(NamedTuple):
    """The possible answers to a situation: n ``texts``, ``features`` f64[n, k], over ``weights[start : start + k]``."""

    texts: tuple[bytes, ...]
    features: Floats
    start: int

    def logits(self, weights: Floats) -> Floats:
        """The logits f64[n], not normalized."""
        logits: Floats = self.features @ weights[self.start : self.start + self.features.shape[1]]
        return logits


class Model:
    """The policy of one weight vector f64[SIZE]. Raises InvalidRequest for another size or a non-finite weight."""

    def __init__(self, weights: Floats) -> None:
        if weights.shape != (SIZE,) or weights.dtype != np.float64:
            raise InvalidRequest(
                f"The weights are {weights.dtype}{list(weights.shape)}.", hint=f"They must be float64[{SIZE}]."
            )
        if not np.isfinite(weights).all():
            raise InvalidRequest(f"Weight {int(np.argmin(np.isfinite(weights)))} is not a finite number.")
        self.weights = weights

    def log_prob(self, prompt: PromptOrSituation, sampled: PromptOrSituation) -> float:
        """The log-probability of sampled token ids (an answer, or its beginning) after the prompt."""
        choice = choice_for(read_situation(prompt_text(prompt)))
        log_p = _log_softmax(choice.logits(self.weights))
        return float(np.logaddexp.reduce(log_p[_consistent(choice, sampled)]))

    def gradient(self, prompt: PromptOrSituation, sampled: PromptOrSituation) -> Floats:
        """Gradient of ``log_prob`` with respect to the weights, f64[SIZE]."""
        choice = choice_for(read_situation(prompt_text(prompt)))
        log_p = _log_softmax(choice.logits(self.weights))
        matching = _consistent(choice, sampled)
        shares = np.exp(_log_softmax(log_p[matching]))
        gradient = np.zeros(SIZE)
        width = choice.features.shape[1]
        gradient[choice.start : choice.start + width] = (
            shares @ choice.features[matching] - np.exp(log_p) @ choice.features
        )
        return gradient


def neutral_weights() -> Floats:
    """The weights of version 0.0: uniform over the possible answers."""
    return np.zeros(SIZE)


@functools.lru_cache(maxsize=8192)
def choice_for(situation: Situation) -> PossibleAnswers:
    """The possible answers to a situation, and their features."""
    match situation:
        case Guess(low, high):
            return _guesses(low, high)
        case Heaps(sizes):
            return _moves(sizes)
        case Sum(left, right):
            return _numbers(SUM.start + (10 * left + right) * _SUMS)
        case OtherArithmetic():
            return _numbers(OTHER.start)
    return PossibleAnswers((b"", b"ok"), np.eye(2), UNKNOWN_PROMPT.start)


def _guesses(low: int, high: int) -> PossibleAnswers:
    spare = max(0, high - low + 1 - MAX_INTERVAL)
    numbers = np.arange(low + spare // 2, high - (spare - spare // 2) + 1)
    position = (numbers - low) / (high - low) if high > low else np.full(1, 0.5)
    centers = np.linspace(0.0, 1.0, BUMPS)
    features = np.exp(-0.5 * ((position[:, None] - centers) / BUMP_WIDTH) ** 2)
    return PossibleAnswers(tuple(_boxed(number) for number in numbers), features, GUESS.start)


def _moves(sizes: tuple[int, ...]) -> PossibleAnswers:
    moves = [(heap, count) for heap, size in enumerate(sizes) for count in range(1, size + 1)]
    if not moves:
        return choice_for(OtherArithmetic())
    texts = tuple(_boxed(f"{heap + 1} {count}") for heap, count in moves)
    if len(sizes) != NIM_HEAPS or max(sizes) > NIM_SIZE:
        return PossibleAnswers(texts, np.zeros((len(moves), 0)), NIM.start)
    position = functools.reduce(lambda index, size: index * (NIM_SIZE + 1) + size, sizes, 0)
    features = np.zeros((len(moves), _NIM_MOVES))
    features[range(len(moves)), [heap * NIM_SIZE + count - 1 for heap, count in moves]] = 1.0
    return PossibleAnswers(texts, features, NIM.start + position * _NIM_MOVES)


def _numbers(start: int) -> PossibleAnswers:
    return PossibleAnswers(tuple(_boxed(number) for number in range(_SUMS)), np.eye(_SUMS), start)


def _boxed(answer: object) -> bytes:
    return b"\\boxed{%s}" % str(answer).encode()


def _consistent(choice: PossibleAnswers, sampled: PromptOrSituation) -> npt.NDArray[np.intp]:
    """Indices of the answers that begin with the sampled ids. Raises InvalidRequest if there are none."""
    ids = [int(token) for token in sampled]
    is_complete = bool(ids) and ids[-1] == END
    text = bytes(ids[:-1] if is_complete else ids)
    matching = [
        index
        for index, answer in enumerate(choice.texts)
        if (answer == text if is_complete else answer.startswith(text))
    ]
    if not matching:
        raise InvalidRequest(f"None of this policy's answers to the prompt begins with the sampled ids {ids}.")
    return np.array(matching)


def _log_softmax(logits: Floats) -> Floats:
    log_p: Floats = logits - np.logaddexp.reduce(logits)
    return log_p

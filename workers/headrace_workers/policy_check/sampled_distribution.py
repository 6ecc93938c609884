"""The test that samples follow the probabilities that a server reports for them. Pure.

* A server that samples as it reports fails with a probability below ``FALSE_ALARM``, for any distribution.
* The first quarter of the answers chooses the sets of answers to count, and the others are counted.
* Answers are compared by their first tokens, for every length, since long answers rarely repeat.
* Reported logprobs may be off by ``ROUNDING``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

FALSE_ALARM = 1e-6
"""Highest probability that a server which samples as it reports fails."""

ROUNDING = 0.01
"""Relative error of a set's probability, from logprobs that an engine rounds or computes in another batch."""

CHOOSING_SHARE = 4
"""Number of answers of which one chooses the sets to count."""


class ProbedAnswer(NamedTuple):
    """The tokens of an answer, and their reported logprobs before temperature and filters."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Deviation(NamedTuple):
    """A set of answers that is drawn more or less often than reported. ``length``: the number of first tokens that
    count; ``size``: the number of different answers; ``reported``: their probability together; ``drawn`` of ``total``
    answers were among them, which has the probability ``chance`` or less."""

    length: int
    size: int
    reported: float
    drawn: int
    total: int
    chance: float


def find_deviation(answers: Sequence[ProbedAnswer], tests: int = 1) -> Deviation | None:
    """The least likely deviation from the reported probabilities; None if chance explains all. ``tests``: the number of
    calls of this function that share ``FALSE_ALARM``."""
    choosing, counted = answers[: len(answers) // CHOOSING_SHARE], answers[len(answers) // CHOOSING_SHARE :]
    longest = max((len(answer.token_ids) for answer in answers), default=0)
    found = [item for length in range(1, longest + 1) for item in _counts(choosing, counted, length)]
    allowed = FALSE_ALARM / (tests * max(1, len(found)))
    least = min(found, key=lambda deviation: deviation.chance, default=None)
    return least if least is not None and least.chance < allowed else None


def _counts(choosing: Sequence[ProbedAnswer], counted: Sequence[ProbedAnswer], length: int) -> Iterator[Deviation]:
    """The counts of sets of answers: the one, two, four … most probable ones, and all that were seen."""
    reports: dict[tuple[int, ...], list[float]] = {}
    for answer in choosing:
        reports.setdefault(tuple(answer.token_ids[:length]), []).append(math.fsum(answer.logprobs[:length]))
    probabilities = {answer: math.exp(math.fsum(values) / len(values)) for answer, values in reports.items()}
    ranked = sorted(probabilities, key=lambda answer: (-probabilities[answer], answer))
    drawn = [tuple(answer.token_ids[:length]) for answer in counted]
    for size in sorted({2**k for k in range(len(ranked).bit_length())} | {len(ranked)}):
        members = set(ranked[:size])
        count = sum(answer in members for answer in drawn)
        reported = min(1.0, math.fsum(probabilities[answer] for answer in members))
        yield Deviation(length, size, reported, count, len(drawn), _chance(count, len(drawn), reported))


def _chance(count: int, total: int, probability: float) -> float:
    """Twice the smaller tail of the binomial distribution, with the rounding in favour of the count."""
    lower, upper = probability * (1 - ROUNDING), min(1.0, probability * (1 + ROUNDING))
    return min(1.0, 2 * min(_tail(range(count, total + 1), total, upper), _tail(range(count + 1), total, lower)))


def _tail(counts: range, total: int, probability: float) -> float:
    """The probability that one of these counts is drawn."""
    if probability >= 1.0:
        return float(total in counts)
    k = np.arange(counts.start, counts.stop)
    choices = math.lgamma(total + 1) - np.array([math.lgamma(n + 1) + math.lgamma(total - n + 1) for n in k])
    return float(
        np.exp(choices + k * math.log(max(probability, 5e-324)) + (total - k) * math.log1p(-probability)).sum()
    )

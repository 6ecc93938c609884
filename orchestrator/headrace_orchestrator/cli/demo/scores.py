"""Scores of guessing a number: exact baselines, and the score of an evaluation.

* Baselines are computed exactly, not simulated.
* A failed episode is a failure, and neither a guess nor a miss.
* A policy has learned only if training, and not the control, improved its score.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from headrace.wire import messages

LOW, HIGH = 1, 50
TARGETS = HIGH - LOW + 1

EVALUATION_TURNS = 15
"""Maximum number of guesses in an evaluation: more than any sensible player needs."""

ENVIRONMENT = "game:GuessTheNumber-v0"

TOLERANCE = 1e-9
"""Tolerance for rounding the mean: greedy play with the same weights makes the same guesses."""


def uniform_guesses(targets: int = TARGETS) -> float:
    """Mean guesses of a player who draws uniformly among the numbers that are still possible."""
    mean = [Fraction(0)]
    for n in range(1, targets + 1):
        below_or_above = sum((k * mean[k] for k in range(n)), Fraction(0))
        mean.append(1 + Fraction(2, n * n) * below_or_above)
    return float(mean[targets])


def binary_search_guesses(targets: int = TARGETS) -> float:
    """Mean guesses of a player who always halves the possible range: the optimum."""
    total, remaining, guess = 0, targets, 1
    while remaining > 0:
        solved = min(remaining, 2 ** (guess - 1))
        total += solved * guess
        remaining -= solved
        guess += 1
    return total / targets


def evaluation_tasks() -> list[dict[str, Any]]:
    """The tasks of an evaluation: one for each possible target."""
    kwargs = {"low": LOW, "high": HIGH, "max_turns": EVALUATION_TURNS, "success_only": True}
    return [
        {"environment": ENVIRONMENT, "seed": target, "kwargs": {**kwargs, "target": target}, "id": str(target)}
        for target in range(LOW, HIGH + 1)
    ]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one evaluation. ``mean_guesses``: over episodes that did not fail; an unsolved one counts with all
    its guesses."""

    targets: int
    solved: int
    mean_guesses: float
    failures: int


def score(reply: messages.EvaluationReply) -> Score:
    """The score of a finished evaluation."""
    played = [episode for episode in reply.episodes if episode.reward is not None]
    return Score(
        targets=reply.wanted,
        solved=sum(episode.reward == 1.0 for episode in played),
        mean_guesses=sum(episode.turns for episode in played) / len(played) if played else float("nan"),
        failures=reply.wanted - len(played),
    )


def has_learned(first: Score, trained: Score, control: Score) -> bool:
    """Return True if training, and not the control, improved the score."""
    return (
        first.failures == trained.failures == control.failures == 0
        and trained.solved == trained.targets
        and trained.mean_guesses < min(first.mean_guesses, uniform_guesses(trained.targets))
        and control.mean_guesses >= first.mean_guesses - TOLERANCE
    )

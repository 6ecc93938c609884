"""The test that samples follow their reported probabilities: exact numbers, false alarms, and power."""

from __future__ import annotations

import math
import random

import pytest

from headrace_workers.policy_check.sampled_distribution import ProbedAnswer, _chance, find_deviation

COUNT = 640


def answers(seed: int, shares: list[float], sampled_as: list[float], length: int = 4) -> list[ProbedAnswer]:
    """Answers whose tokens are independent: drawn with one distribution, reported with another."""
    drawn, made = random.Random(seed), []
    for _ in range(COUNT):
        tokens = drawn.choices(range(len(shares)), sampled_as, k=length)
        made.append(ProbedAnswer(tokens, [math.log(shares[token]) for token in tokens]))
    return made


def random_shares(seed: int) -> list[float]:
    drawn = random.Random(seed)
    weights = [drawn.random() ** drawn.choice([1, 4, 20]) + 1e-9 for _ in range(drawn.choice([2, 5, 50, 500]))]
    return [weight / sum(weights) for weight in weights]


def test_the_chance_of_a_count_is_twice_the_exact_tail_of_the_binomial_distribution() -> None:
    upper = 0.5 * 1.01
    assert _chance(9, 10, 0.5) == pytest.approx(2 * (10 * upper**9 * (1 - upper) + upper**10))
    lower = 0.5 * 0.99
    assert _chance(1, 10, 0.5) == pytest.approx(2 * ((1 - lower) ** 10 + 10 * lower * (1 - lower) ** 9))
    assert _chance(10, 10, 1.0) == 1.0
    assert _chance(9, 10, 1.0) == pytest.approx(2 * (1 - 0.99**10)), "probabilities near 1 are rounded too"


def test_a_server_that_samples_as_it_reports_never_fails() -> None:
    found = [find_deviation(answers(seed, shares, shares)) for seed in range(40) for shares in [random_shares(seed)]]
    assert found == [None] * 40


@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_another_temperature_is_found(temperature: float) -> None:
    shares = [0.4, 0.3, 0.15, 0.1, 0.05]
    found = find_deviation(answers(1, shares, [share ** (1 / temperature) for share in shares]))
    assert found is not None
    assert found.chance < 1e-9


def test_a_token_of_5_percent_that_is_never_sampled_is_found() -> None:
    shares = [0.6, 0.25, 0.1, 0.05]
    found = find_deviation(answers(1, shares, [*shares[:3], 0.0]))
    assert found is not None
    assert found.length == 1 or found.drawn == found.total


def test_a_few_of_many_equally_likely_tokens_are_found() -> None:
    found = find_deviation(answers(1, [1 / 1000] * 1000, [1.0] * 20 + [0.0] * 980))
    assert found is not None
    assert found.drawn > 0
    assert found.reported <= 0.02 + 1e-9
    assert found.chance < 1e-300

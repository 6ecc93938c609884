"""Rounding errors of rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reward_precision import FLOAT32_ROUNDING_LEVEL, are_equal, largest_error, reward_error, reward_errors

REWARDS = st.floats(-1e12, 1e12) | st.floats(-999999995904.0, 999999995904.0, width=32)


def test_rewards_that_are_all_float32_numbers_came_in_float32() -> None:
    assert reward_error([float(np.float32(0.1)), 1.0]) == pytest.approx(1.1 * FLOAT32_ROUNDING_LEVEL)
    assert reward_error([0.1, 1.0]) == pytest.approx(1.1e-12)


def test_a_reward_beyond_float32_that_an_earlier_version_accepted_has_the_error_of_float64() -> None:
    assert reward_error([1e50]) == pytest.approx(1e38)
    assert reward_error([0.0, 1e50, -1e50]) == pytest.approx(2e38)


def test_the_error_grows_with_the_magnitudes_that_were_added_not_with_their_sum() -> None:
    assert reward_error([4096.0, -4096.0]) == pytest.approx(8192 * FLOAT32_ROUNDING_LEVEL)
    assert reward_error([]) == FLOAT32_ROUNDING_LEVEL


@given(st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=1, max_size=5))
def test_the_two_forms_give_the_same_errors(episodes: list[list[float]]) -> None:
    rewards = np.array([reward for episode in episodes for reward in episode])
    offsets = np.cumsum([0, *map(len, episodes)])
    errors = reward_errors(rewards, offsets)
    assert errors == pytest.approx(list(map(reward_error, episodes)))
    assert errors.max() <= largest_error(rewards, offsets) * (1 + 1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0, 1e-7, 1e-6, 3e-6, 1e-12, 1e300]), min_size=1, max_size=8))
def test_values_are_equal_if_their_deviation_is_within_the_smallest_error(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = len(set(values)) == 1 or bool(np.std(values) <= 1e-6)
    assert are_equal(values, [1e-6, *[1.0] * (len(values) - 1)]) == expected

"""Rounding errors of rewards: how far equal rewards may differ by the precision that they came in.

* Rewards that are all float32 numbers came in float32: their error is that of float32, else that of float64.
* The error grows with the magnitudes that were added, not with their sum: large rewards that cancel keep theirs.
* The two forms, for one list and for flat arrays, give the same errors.

float16 and bfloat16 are not told from exact fractions, such as 127 of 128 tests; their errors count as a spread.
"""

from __future__ import annotations

import math
import struct
from array import array

import numpy as np
import numpy.typing as npt

from headrace.moments import ROUNDING_LEVEL

FLOAT32_ROUNDING_LEVEL = 1e-6
"""Largest rounding error of a sum of float32 rewards, relative to the larger of 1 and the sum of their magnitudes:
about eight units in the last place. For float64 it is ``ROUNDING_LEVEL``."""

_FLOAT32 = struct.Struct("<f")


def reward_error(rewards: list[float]) -> float:
    """The rounding error of the sum of an agent's rewards in an episode."""
    if len(rewards) == 1:  # the most common number, at a third of the cost
        (reward,) = rewards
        level = FLOAT32_ROUNDING_LEVEL if _FLOAT32.unpack(_FLOAT32.pack(reward))[0] == reward else ROUNDING_LEVEL
        return level * max(1.0, abs(reward))
    level = FLOAT32_ROUNDING_LEVEL if array("f", rewards).tolist() == rewards else ROUNDING_LEVEL
    return level * max(1.0, math.fsum(map(abs, rewards)))


def largest_error(rewards: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64]) -> float:
    """A bound of all ``reward_errors``, at a fraction of their cost."""
    if not len(rewards):
        return FLOAT32_ROUNDING_LEVEL
    largest, longest = max(rewards.max(), -rewards.min()), np.diff(offsets).max()
    return FLOAT32_ROUNDING_LEVEL * max(1.0, float(largest) * int(longest))


def reward_errors(rewards: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The rounding error of the sum of rewards of each agent episode, f64[episodes].

    ``rewards`` f64[turns], ``offsets`` i64[episodes + 1].
    """
    with np.errstate(over="ignore"):
        precise = rewards.astype(np.float32) != rewards
    episodes = len(offsets) - 1
    episode = np.repeat(np.arange(episodes), np.diff(offsets))
    has_precise = np.bincount(episode, precise, episodes) > 0
    level = np.where(has_precise, ROUNDING_LEVEL, FLOAT32_ROUNDING_LEVEL)
    return level * np.maximum(1.0, np.bincount(episode, np.abs(rewards), episodes))


def are_equal(values: list[float], errors: list[float]) -> bool:
    """True if the standard deviation of some sums of rewards is at most the smallest of their rounding errors."""
    low, high = min(values), max(values)
    if low == high:
        return True
    error = min(errors)
    if high - low > 2 * error * math.sqrt(len(values)):  # the spread is at least (high - low) / sqrt(2 n)
        return False
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) <= error

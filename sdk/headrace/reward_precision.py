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

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_pack, _unpack = struct.Struct("<f").pack, struct.Struct("<f").unpack


def reward_error(rewards: list[float]) -> float:
    """The rounding error of the sum of an agent's rewards in an episode."""
    if len(rewards) > 1:
        rewards = list(filter(None, rewards))  # most turns give none
    if len(rewards) == 1:  # the most common number, at half the cost
        reward = rewards[0]
        magnitude = abs(reward)
        is_float32 = magnitude <= _MAX_FLOAT32 and _unpack(_pack(reward))[0] == reward
    else:
        magnitude = math.fsum(map(abs, rewards))
        is_float32 = array("f", rewards).tolist() == rewards
    level = FLOAT32_ROUNDING_LEVEL if is_float32 else ROUNDING_LEVEL
    return level * magnitude if magnitude > 1.0 else level


def largest_error(rewards: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64]) -> float:
    """A bound of all ``reward_errors``, at a fraction of their cost."""
    if not len(rewards):
        return FLOAT32_ROUNDING_LEVEL
    # The sum of n magnitudes is at most the root of n times their norm, and a norm costs one product.
    longest = int(np.maximum.reduce(offsets[1:] - offsets[:-1]))
    return FLOAT32_ROUNDING_LEVEL * max(1.0, math.sqrt(longest * float(rewards @ rewards)))


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

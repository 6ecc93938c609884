from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.moments import Moments, merge_all

VALUES = st.lists(st.floats(-1e3, 1e3), max_size=40)
LARGE = st.lists(st.integers(-1000, 1000).map(lambda k: 1000 + k / 10_000), min_size=1, max_size=40)


def agree(one: Moments, other: Moments, scale: float = 1.0) -> bool:
    return (
        one.n == other.n
        and math.isclose(one.mean, other.mean, rel_tol=1e-12, abs_tol=1e-12 * scale)
        and math.isclose(one.m2, other.m2, rel_tol=1e-9, abs_tol=1e-9 * scale)
    )


@settings(deadline=None)
@given(st.lists(VALUES, max_size=6), st.randoms(use_true_random=False))
def test_the_moments_of_a_whole_are_the_merged_moments_of_its_parts_in_any_order(parts, rng) -> None:
    whole = Moments.of([value for part in parts for value in part])
    shuffled = list(parts)
    rng.shuffle(shuffled)
    assert agree(merge_all(Moments.of(part) for part in shuffled), whole, scale=1e3)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_a_merged_part_can_be_removed_again(rest, part) -> None:
    whole = Moments.of(rest).merge(Moments.of(part))
    assert agree(whole.without(Moments.of(part)), Moments.of(rest), scale=1e3)


@settings(deadline=None)
@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=20),
    st.floats(-1e9, 1e9),
    st.lists(st.integers(0, 3), min_size=20, max_size=20),
)
def test_parts_of_values_far_from_zero_agree_with_their_whole(deviations, offset, part_of) -> None:
    values = [offset + deviation for deviation in deviations]
    parts = [[x for x, part in zip(values, part_of, strict=False) if part == number] for number in range(4)]
    whole, merged = Moments.of(values), merge_all(map(Moments.of, parts))
    assert whole.agrees(merged)
    # But one value that is another is seen, however far away they are.
    assert not whole.agrees(Moments.of([*values[1:], values[0] + 1.0]))


def test_removing_more_than_the_whole_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="moments of 3 values cannot be removed from those of 2"):
        Moments.of([1.0, 2.0]).without(Moments.of([1.0, 2.0, 3.0]))


@settings(deadline=None)
@given(LARGE)
def test_a_spread_that_is_small_relative_to_the_mean_is_preserved(values) -> None:
    moments = Moments.of(values)
    assert math.isclose(moments.mean, statistics.fmean(values), rel_tol=1e-13)
    assert math.isclose(moments.variance(), statistics.pvariance(values), rel_tol=1e-9, abs_tol=1e-20)


def test_a_variance_is_never_negative() -> None:
    values = np.float32(1000) + np.array([0.1, -0.1, 0.1, -0.1], np.float32)
    assert Moments.of(values).std() == pytest.approx(0.1, rel=1e-3)


def test_a_weight_counts_a_value_that_many_times() -> None:
    weighted = Moments.of([1.0, 4.0, 2.0], weights=[3, 1, 2])
    assert agree(weighted, Moments.of([1.0, 1.0, 1.0, 4.0, 2.0, 2.0]))
    assert Moments.of([1.0, 2.0], weights=[0, 0]) == Moments()


@pytest.mark.parametrize(
    ("values", "ddof", "expected"), [([1, 3], 0, 1.0), ([1, 3], 1, 2.0), ([5], 1, 0.0), ([], 0, 0.0)]
)
def test_variance_takes_its_degrees_of_freedom(values, ddof: int, expected: float) -> None:
    assert Moments.of(values).variance(ddof) == expected
    assert Moments.of(values).std(ddof) == math.sqrt(expected)


@pytest.mark.parametrize("value", [0.0, 0.1, 1000.7, -3.3e9])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_equal_values_are_constant(value: float, count: int) -> None:
    moments = Moments.of([value] * count)
    assert moments.is_constant()
    assert (moments.mean, moments.m2) == (value, 0.0)
    assert not Moments.of([value, value + 1e-3 * max(1.0, abs(value))]).is_constant()

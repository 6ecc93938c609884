"""Checks of what a policy sampled (field case G09)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import PolicyFailure
from headrace.trajectory import Version, VersionRun
from headrace_workers.policies import Sample, check_sample, one_version


def _sample(ids: list[int], logprobs: list[float], versions: list[VersionRun] | None = None) -> Sample:
    runs = versions if versions is not None else one_version(len(ids), Version(0, 0))
    return Sample(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=runs)


BROKEN = {
    "logprob-nan": math.nan,
    "logprob-missing": None,
    "logprob-infinite": -math.inf,
    "logprob-positive": 0.3,
    "logprob-out-of-range": -1e308,
}


@pytest.mark.parametrize(("kind", "value"), BROKEN.items())
def test_each_bad_logprob_has_its_own_kind_and_names_its_position(kind: str, value: float) -> None:
    logprobs = [-1.0] * 10
    logprobs[4] = value
    with pytest.raises(PolicyFailure, match="position 4") as caught:
        check_sample(_sample(list(range(10)), logprobs), 262, 1000)
    assert (caught.value.kind, caught.value.retryable) == (kind, True)


@pytest.mark.parametrize(("count", "kind"), [(9, "logprobs-too-few"), (11, "logprobs-too-many")])
def test_lengths_that_disagree_are_refused(count: int, kind: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        check_sample(_sample(list(range(10)), [-1.0] * count), 262, 1000)
    assert caught.value.kind == kind


@pytest.mark.parametrize("token", [-1, 262])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(PolicyFailure, match="position 1") as caught:
        check_sample(_sample([5, token], [-1.0, -1.0]), 262, 1000)
    assert caught.value.kind == "token-out-of-range"


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(PolicyFailure) as caught:
        check_sample(_sample([], []), 262, 1000)
    assert caught.value.kind == "empty-sample"


@pytest.mark.parametrize("ends", [[], [1], [3], [2, 2], [1, 3]])
def test_version_runs_cover_the_whole_sample_in_order(ends: list[int]) -> None:
    with pytest.raises(PolicyFailure) as caught:
        check_sample(_sample([1, 2], [-1.0, -1.0], [VersionRun(end, 0, 0) for end in ends]), 262, 1000)
    assert caught.value.kind == "versions-do-not-cover"


@given(st.lists(st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_every_finite_logprob_up_to_zero_is_accepted(logprobs: list[float]) -> None:
    check_sample(_sample([1] * len(logprobs), logprobs), 262, 1000)
    check_sample(_sample([1] * len(logprobs), np.array(logprobs, np.float32)), 262, 1000)  # type: ignore[arg-type]

"""A batch from which the learner drops rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.batch.batch import Batch
from headrace.errors import InvalidRequest
from tests.builders import make_multi_segment, make_trajectory
from tests.sdk.batch.test_batch import ESTIMATORS, body_of, group_of
from tests.sdk.batch.test_shards import mixed_body


@pytest.mark.parametrize("name", ESTIMATORS)
def test_recut_returns_exactly_the_batch_that_the_kept_rows_would_form(name: str) -> None:
    groups = [[make_trajectory(number=10 * g + k, rewards=[k, g, -k]) for k in range(1, 5)] for g in (1, 2, 3)]
    body = body_of([group_of(members, name=f"g{g}", expected=4) for g, members in enumerate(groups)], name=name)
    remaining = [groups[0][1:], groups[2][:1]]
    expected = Batch.parse(
        body_of(
            [group_of(remaining[0], name="g0", expected=4), group_of(remaining[1], name="g2", expected=4)], name=name
        )
    )
    whole = Batch.parse(body, generation=3)
    keep = {trajectory.id for members in remaining for trajectory in members}
    cut = whole.recut([row.trajectory.id in keep for row in whole.rows])
    assert cut.manifest == expected.manifest
    assert cut.columns.keys() == expected.columns.keys()
    for column, values in expected.columns.items():
        assert cut.columns[column].tobytes() == values.tobytes(), column
    assert [row.trajectory.id for row in cut.rows] == [row.trajectory.id for row in expected.rows]
    assert (cut.id, cut.generation, cut.lease_s) == (whole.id, 3, whole.lease_s)
    cut.verify()


def test_returns_include_the_turns_of_dropped_rows() -> None:
    batch = Batch.parse(body_of([group_of([make_multi_segment(number=1, rewards=(0.5, -0.25, 1.0))])], gamma=0.5))
    first = batch.recut([True, False])
    assert first.manifest.counts.rows == 1
    assert first.rows[0].returns.tolist() == batch.rows[0].returns.tolist()
    assert first.manifest.moments.rewards.mean == 1.25
    assert batch.manifest.counts.rows == 2, "the batch itself is as it was"


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_two_recuts_equal_one_with_both_masks(data: st.DataObject) -> None:
    whole = Batch.parse(mixed_body())
    number = len(whole.rows)
    first = np.array(data.draw(st.lists(st.booleans(), min_size=number, max_size=number)))
    once = whole.recut(first)
    again = np.array(data.draw(st.lists(st.booleans(), min_size=len(once.rows), max_size=len(once.rows))), bool)
    both = first.copy()
    both[first] = again
    one, other = once.recut(again), whole.recut(both)
    assert one.manifest == other.manifest
    assert [row.trajectory.id for row in one.rows] == [row.trajectory.id for row in other.rows]
    one.verify()


def test_keeping_all_rows_changes_nothing_and_keeping_none_is_an_empty_batch() -> None:
    whole = Batch.parse(mixed_body())
    same = whole.recut(np.ones(len(whole.rows), bool))
    assert same.manifest == whole.manifest
    nothing = whole.recut(np.zeros(len(whole.rows), bool))
    assert (nothing.rows, nothing.manifest.counts.groups, nothing.trajectories) == ([], 0, [])


@pytest.mark.parametrize("keep", [[True], np.ones(3), "yes"])
def test_a_mask_of_another_shape_is_refused(keep: object) -> None:
    with pytest.raises(InvalidRequest, match=r"not bool\["):
        Batch.parse(mixed_body()).recut(keep)  # type: ignore[arg-type]

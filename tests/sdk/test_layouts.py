"""Layouts, with the episodes of case G24."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.batch.batch import Row
from headrace.errors import InvalidRequest
from headrace.layouts import Layout, packed, padded, scalar_advantages, split_turns
from tests.builders import make_segment, make_trajectory
from tests.sdk.batch.batches import EPISODE, SIBLING, g24_rows, rows_of

LAYOUTS = {
    "packed": packed,
    "left-padded": lambda rows, *, shift: padded(rows, side="left", shift=shift, pad_token_id=9),
    "right-padded": lambda rows, *, shift: padded(rows, side="right", shift=shift, pad_token_id=9),
    "wide": lambda rows, *, shift: padded(rows, side="right", shift=shift, width=300, pad_token_id=9),
}


# G24 ------------------------------------------------------------------------------------------------------------


def check_g24(layout: Layout, rows: list[Row], expected: tuple[float, float, float, float], shift: bool) -> None:
    for number, (shape, advantage) in enumerate(zip((*EPISODE, SIBLING), expected, strict=True)):
        mine = layout.row_ids == number
        positions = layout.position_ids[mine]
        span = np.arange(shape.start - shift, shape.end - shift)
        assert mine.sum() == shape.length
        assert positions[layout.advantages[mine] != 0].tolist() == (span.tolist() if advantage else [])
        assert positions[layout.mask[mine] == 1].tolist() == span.tolist()
        assert set(layout.advantages[mine][span].tolist()) == {advantage}
        np.testing.assert_array_equal(layout.logprobs[mine][span], rows[number].logprobs[shape.start : shape.end])
        np.testing.assert_array_equal(layout.token_ids[mine], rows[number].token_ids)
        assert np.count_nonzero(layout.logprobs[mine]) == shape.end - shape.start
    padding = layout.row_ids == -1
    for array in (layout.mask, layout.logprobs, layout.advantages, layout.position_ids):
        assert not array[padding].any()
    assert set(layout.token_ids[padding].tolist()) <= {9}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_episodes_advantage_is_at_each_rows_own_tokens(name: str, shift: bool) -> None:
    rows = g24_rows((0.0, 0.0, 1.0), 0.0, name="grpo")
    layout = LAYOUTS[name](rows, shift=shift)
    check_g24(layout, rows, (1.0, 1.0, 1.0, -1.0), shift)
    assert [int((layout.advantages[layout.row_ids == k] != 0).sum()) for k in range(3)] == [5, 20, 3]
    assert layout.advantages[(layout.row_ids >= 0) & (layout.row_ids < 3)].sum() == 28.0


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_per_turn_advantages_are_at_each_rows_own_tokens(name: str, shift: bool) -> None:
    # The advantages of `reinforce` are returns: 0.5, -0.25 and 2.0 come from these rewards.
    rows = g24_rows((0.75, -2.25, 2.0), 0.0, name="reinforce")
    layout = LAYOUTS[name](rows, shift=shift)
    check_g24(layout, rows, (0.5, -0.25, 2.0, 0.0), shift)
    assert layout.advantages[layout.row_ids >= 0].sum() == 3.5


def test_a_layout_with_one_scalar_per_row_accepts_rows_whose_turns_agree() -> None:
    assert scalar_advantages(g24_rows((0.0, 0.0, 1.0), 0.0, name="grpo")).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert scalar_advantages(g24_rows((0.75, -2.25, 2.0), 0.0, name="reinforce")).tolist() == [0.5, -0.25, 2.0, 0.0]


def one_row_with_turns_that_differ() -> list[Row]:
    spans = [(40, 45), (55, 75), (80, 83)]
    segment = make_segment(spans=spans, length=90, rewards=[0.75, -2.25, 2.0])
    return rows_of([make_trajectory(segments=[segment])], name="reinforce")


def test_a_layout_with_one_scalar_per_row_refuses_a_row_whose_turns_differ() -> None:
    with pytest.raises(InvalidRequest, match=r"Row 0 has turns with different advantages \(-0.25 to 2\)"):
        scalar_advantages(one_row_with_turns_that_differ())


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_split_rows_have_each_turn_once(name: str, shift: bool) -> None:
    split = split_turns(one_row_with_turns_that_differ())
    assert scalar_advantages(split).tolist() == [0.5, -0.25, 2.0]
    layout = LAYOUTS[name](split, shift=shift)
    assert [int((layout.advantages[layout.row_ids == k] != 0).sum()) for k in range(3)] == [5, 20, 3]
    assert [int(layout.mask[layout.row_ids == k].sum()) for k in range(3)] == [5, 20, 3]
    assert layout.advantages.sum() == 3.5
    np.testing.assert_array_equal(layout.logprobs != 0, layout.mask == 1)


# Other layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [False, True])
def test_padding_is_on_the_given_side(shift: bool) -> None:
    rows = rows_of([make_trajectory(number=1, turns=1), make_trajectory(number=2, turns=2)], name="reinforce")
    left, right = (padded(rows, side=side, shift=shift) for side in ("left", "right"))
    assert left.row_ids.tolist() == [[-1] * 7 + [0] * 10, [1] * 17]
    assert right.row_ids.tolist() == [[0] * 10 + [-1] * 7, [1] * 17]
    flat = packed(rows, shift=shift)
    for name, array in flat._asdict().items():
        np.testing.assert_array_equal(array, getattr(left, name)[left.row_ids >= 0])
        np.testing.assert_array_equal(array, getattr(right, name)[right.row_ids >= 0])
    assert np.flatnonzero(flat.position_ids == 0).tolist() == [0, 10]


def test_dtypes_are_those_of_the_rows() -> None:
    layout = packed(rows_of([make_trajectory()], name="reinforce"))
    assert [array.dtype.str for array in layout] == ["<i4", "|u1", "<f4", "<f4", "<i4", "<i4"]


def test_a_row_longer_than_the_width_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="A row of 10 tokens exceeds the width of 9"):
        padded(rows_of([make_trajectory()], name="reinforce"), side="left", width=9)


def test_a_row_that_samples_its_first_token_cannot_be_shifted() -> None:
    rows = rows_of([make_trajectory(segments=[make_segment(spans=[(0, 4)])])], name="reinforce")
    with pytest.raises(InvalidRequest, match="Row 0 starts with a sampled token"):
        packed(rows, shift=True)
    assert packed(rows).mask.tolist() == [1, 1, 1, 1]


def test_no_rows_give_empty_arrays() -> None:
    assert packed([]).token_ids.shape == (0,)
    assert padded([], side="left").token_ids.shape == (0, 0)
    assert scalar_advantages([]).shape == (0,)

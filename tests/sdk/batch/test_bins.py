"""Bins: first-fit decreasing, compared with a plain implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.batch.batch import Batch
from headrace.batch.bins import pack_bins
from headrace.batch.build import build_head
from headrace.batch.manifest import BatchSelection
from headrace.errors import InvalidRequest
from headrace.runspec import EstimatorSpec
from tests.sdk.batch.test_batch import MAKERS, NOW, group_of
from tests.sdk.batch.test_shards import bodies_of

SIZES = st.lists(st.integers(0, 50), max_size=80)


def plain(sizes: list[int], capacity: int) -> list[int]:
    """First-fit decreasing with a loop over the bins."""
    bins, loads = [0] * len(sizes), []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        fits = [number for number, load in enumerate(loads) if load + sizes[row] <= capacity]
        if not fits:
            fits = [len(loads)]
            loads.append(0)
        loads[fits[0]] += sizes[row]
        bins[row] = fits[0]
    return bins


@given(SIZES, st.integers(50, 200))
def test_first_fit_decreasing_equals_a_plain_implementation(sizes, capacity):
    assert pack_bins(sizes, capacity).tolist() == plain(sizes, capacity)


@given(SIZES, st.integers(50, 200))
def test_a_bin_never_exceeds_its_bound_and_all_but_one_are_more_than_half_full(sizes, capacity):
    loads = np.bincount(pack_bins(sizes, capacity), weights=sizes)
    assert (loads <= capacity).all()
    assert (loads * 2 <= capacity).sum() <= 1


def test_a_row_longer_than_a_bin_is_refused():
    with pytest.raises(InvalidRequest, match="A row of 11 tokens does not fit into a bin of 10"):
        pack_bins([3, 11], 10)


def test_without_packing_each_row_is_its_own_bin():
    assert pack_bins([5, 1, 9], 0).tolist() == [0, 1, 2]
    assert pack_bins([], 7).tolist() == []


# In a batch ---------------------------------------------------------------------------------------------------


def packed_body(bin_tokens: int) -> bytes:
    """Episodes of one row and of several, packed."""
    makers = list(MAKERS.values())
    groups = [
        group_of([makers[(g + k) % len(makers)](4 * g + k + 1) for k in range(4)], name=f"g{g}") for g in range(6)
    ]
    head = build_head(
        batch="b",
        run="run",
        estimator=EstimatorSpec(name="grpo"),
        version=NOW,
        groups=[group for group, _ in groups],
        selection=BatchSelection(order="uniform", tags=["hard"]),
        bin_tokens=bin_tokens,
    )
    return head + b"".join(records for _, records in groups)


def longest(batch: Batch) -> int:
    return max(len(row.token_ids) for row in batch.rows)


def test_a_batch_has_the_bin_of_each_row():
    bin_tokens = 2 * longest(Batch.parse(packed_body(0)))
    batch = Batch.parse(packed_body(bin_tokens))
    batch.verify()
    bins = batch.bins()
    assert len(bins) == batch.manifest.counts.bins < batch.manifest.counts.rows
    assert batch.manifest.bin_tokens == bin_tokens
    assert sorted(row.index for rows in bins for row in rows) == list(range(batch.manifest.counts.rows))
    assert all(sum(len(row.token_ids) for row in rows) <= bin_tokens for rows in bins)
    assert any(len({row.trajectory.id for row in batch.rows if row.bin == bin}) > 1 for bin in range(len(bins)))


def test_without_bin_tokens_a_batch_has_one_bin_per_row():
    batch = Batch.parse(packed_body(0))
    assert [[row.index for row in rows] for rows in batch.bins()] == [[n] for n in range(batch.manifest.counts.rows)]


@pytest.mark.parametrize("shards", [1, 2, 3, 50])
def test_a_shard_holds_whole_bins(shards):
    whole = Batch.parse(packed_body(2 * longest(Batch.parse(packed_body(0)))))
    cut = [Batch.parse(body) for body in bodies_of(packed_body(whole.manifest.bin_tokens), shards)]
    for shard in cut:
        shard.verify()
    bins = [{row.bin for row in shard.rows} for shard in cut]
    assert sum(map(len, bins)) == len(set().union(*bins)) == whole.manifest.counts.bins
    rows = {row.index: row.bin for shard in cut for row in shard.rows}
    assert rows == {row.index: row.bin for row in whole.rows}


def test_a_recut_batch_is_packed_again():
    batch = Batch.parse(packed_body(2 * longest(Batch.parse(packed_body(0)))))
    cut = batch.recut(np.arange(batch.manifest.counts.rows) % 2 == 0)
    cut.verify()
    assert cut.manifest.counts.bins < batch.manifest.counts.bins
    assert cut.manifest.selection == batch.manifest.selection
    assert cut.manifest.bin_tokens == batch.manifest.bin_tokens


def test_a_body_with_an_overfull_bin_is_refused():
    body = packed_body(2 * longest(Batch.parse(packed_body(0))))
    batch = Batch.parse(body)
    column = batch.columns["row_bin"]
    at = body.index(column.tobytes())
    with pytest.raises(InvalidRequest, match="a bin holds"):
        Batch.parse(body[:at] + np.zeros_like(column).tobytes() + body[at + column.nbytes :])

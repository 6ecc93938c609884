"""Shards of a batch, built from its head and read as a learner reads them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.batch import shards as sharding
from headrace.batch.batch import Batch, Row
from headrace.batch.body import pack_head, read_head
from headrace.batch.manifest import MomentSet, Shard, ShardPart
from headrace.batch.shards import ShardedBatch, assign_bins, find_disagreement, shard_part
from headrace.errors import HeadraceError, InvalidRequest
from headrace.layouts import FillerRow, filled, packed, padded, scalar_advantages
from headrace.moments import Moments, merge_all
from tests.builders import make_multi_segment, make_trajectory
from tests.sdk.batch.test_batch import MAKERS, body_of, group_of, usual_body

NAMES = MomentSet.__struct_fields__


def shards_of(body: bytes, shards: int) -> list[Batch]:
    """The shards of the batch as the ranks receive them."""
    return [Batch.parse(body) for body in bodies_of(body, shards)]


def bodies_of(body: bytes, shards: int) -> list[bytes]:
    head = read_head(body)
    records = [body[head.records_start + a : head.records_start + b] for a, b in spans(head.columns)]
    cuts = [ShardedBatch(head, shards).shard(number) for number in range(shards)]
    return [cut.head + b"".join(records[number] for number in cut.records) for cut in cuts]


def spans(columns: Any) -> list[tuple[int, int]]:
    offsets = columns["record_offsets"].tolist()
    return list(itertools.pairwise(offsets))


@functools.cache
def mixed_body(name: str = "grpo") -> bytes:
    """Episodes of one row and of several, with one agent and two, in two environments."""
    kinds = list(MAKERS.values())
    number = iter(range(1, 100))
    groups = [
        group_of([kinds[(size + k) % len(kinds)](next(number)) for k in range(size)], name=f"g{size}", environment=env)
        for size, env in ((5, "a"), (1, "b"), (3, "a"), (4, "b"))
    ]
    return body_of(groups, name=name)


def row_values(row: Row) -> tuple[Any, ...]:
    """All values of a row."""
    numbers = (row.returns, row.rewards, row.weights, row.token_ids, row.served_advantages)
    return (row.trajectory.id, row.group.id, *(None if array is None else array.tobytes() for array in numbers))


@pytest.mark.parametrize("name", ["none", "grpo", "reinforce_pp"])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40])
def test_shards_are_disjoint_and_their_union_is_the_batch(shards: int, name: str) -> None:
    whole = Batch.parse(mixed_body(name))
    rows: dict[int, tuple[Any, ...]] = {}
    for shard in shards_of(mixed_body(name), shards):
        shard.verify()
        assert shard.manifest == whole.manifest
        for row in shard.rows:
            assert row.index not in rows
            rows[row.index] = row_values(row)
    assert rows == {row.index: row_values(row) for row in whole.rows}


@pytest.mark.parametrize("shards", [1, 2, 5, 40])
def test_counts_and_moments_of_all_shards_merge_to_the_manifest(shards: int) -> None:
    cut = shards_of(mixed_body(), shards)
    manifest = cut[0].manifest
    parts = [batch.shard.part for batch in cut if batch.shard]
    assert all(batch.shard and batch.shard.parts == parts for batch in cut)
    for name in ("rows", "turns", "sampled_tokens", "tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(manifest.counts, name)
    for name in NAMES:
        assert merge_all(getattr(part.moments, name) for part in parts).agrees(getattr(manifest.moments, name))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=24),
    st.floats(-1e9, 1e9),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_moments_of_random_splits_merge_to_the_manifest(
    rewards: list[float], offset: float, shards: int, random: Any
) -> None:
    given_rewards = [offset + reward for reward in rewards]
    trajectories = [
        make_multi_segment(number=number, rewards=(reward, -reward, reward))
        for number, reward in enumerate(given_rewards, 1)
    ]
    head = read_head(body_of([group_of(trajectories)]))
    of_row = np.array([random.randrange(shards) for _ in head.columns["row_tokens"]])
    whole = ShardedBatch(head, shards)
    whole._rows = [np.flatnonzero(of_row == number) for number in range(shards)]
    of_turn = np.repeat(of_row, np.diff(head.columns["row_turn_offsets"]))
    whole._turns = [np.flatnonzero(of_turn == number) for number in range(shards)]
    columns = [whole._columns_of(number) for number in range(shards)]
    parts = [shard_part(head.manifest, own) for own in columns]
    for number, own in enumerate(columns):
        assert find_disagreement(head.manifest, Shard(number=number, parts=parts), own) == ""


def test_rows_of_one_episode_may_be_in_several_shards_and_its_reward_counts_once() -> None:
    trajectory = make_multi_segment(number=1, rewards=(0.5, -0.25, 1.0))
    cut = shards_of(body_of([group_of([trajectory])]), 2)
    assert [len(batch.rows) for batch in cut] == [1, 1]
    assert [batch.trajectories[0].id for batch in cut] == [trajectory.id] * 2
    assert sorted(batch.shard.part.moments.rewards.n for batch in cut if batch.shard) == [0.0, 1.0]


def test_shards_are_balanced_by_the_tokens_of_their_rows() -> None:
    tokens = np.random.default_rng(6).integers(10, 4001, 1032)
    for shards in (7, 8, 64):
        loads = np.bincount(assign_bins(tokens, shards), tokens, shards)
        assert loads.max() <= 1.1 * loads.mean()
    assert np.bincount(assign_bins(np.array([100, 1, 1, 1]), 2)).tolist() == [1, 3], "a long row is alone in its shard"


def test_the_same_batch_and_number_of_shards_always_give_the_same_shards() -> None:
    assert bodies_of(mixed_body(), 3) == bodies_of(mixed_body(), 3)
    assert assign_bins(np.array([5, 5, 5, 5]), 2).tolist() == [0, 1, 0, 1]


def test_a_shard_may_be_empty() -> None:
    body = body_of([group_of([make_trajectory(number=k) for k in (1, 2, 3)])])
    cut = shards_of(body, 8)
    empty = [batch for batch in cut if not batch.rows]
    assert len(empty) == 5
    for batch in empty:
        batch.verify()
        assert (batch.trajectories, batch.manifest.counts.rows) == ([], 3)
        assert batch.shard is not None
        assert batch.shard.part.moments == MomentSet(**dict.fromkeys(NAMES, Moments()))
        assert batch.shard.most_rows == 1


@pytest.mark.parametrize("change", ["own rows", "own moments", "other moments", "number", "environments"])
def test_a_shard_that_does_not_merge_to_the_manifest_is_refused(change: str) -> None:
    head = read_head(mixed_body())
    cut = bodies_of(mixed_body(), 2)[0]
    own = read_head(cut)
    assert own.shard is not None
    parts = list(own.shard.parts)
    wrong = Moments(1.0, 2.0, 3.0)

    def other(part: ShardPart, **fields: Any) -> ShardPart:
        return msgspec.structs.replace(part, **fields)

    number = 0
    if change == "own rows":
        parts[0] = other(parts[0], turns=parts[0].turns + 1)
    elif change == "number":
        number = 2
    elif change == "environments":
        parts[1] = other(parts[1], environments={})
    else:
        at = 0 if change == "own moments" else 1
        parts[at] = other(parts[at], moments=msgspec.structs.replace(parts[at].moments, rewards=wrong))
    forged = pack_head(head.manifest, own.columns, Shard(number=number, parts=parts)) + cut[own.records_start :]
    with pytest.raises(InvalidRequest, match="disagrees with its manifest"):
        Batch.parse(forged)


def test_a_shard_with_another_shards_rows_is_refused() -> None:
    first, second = (read_head(body) for body in bodies_of(mixed_body(), 2))
    body = bodies_of(mixed_body(), 2)[1]
    forged = pack_head(first.manifest, second.columns, first.shard) + body[second.records_start :]
    with pytest.raises(InvalidRequest, match="disagrees"):
        Batch.parse(forged)


def test_verify_recomputes_a_shards_columns() -> None:
    body = bodies_of(mixed_body(), 2)[0]
    head = read_head(body)
    assert head.shard is not None
    columns = {name: column.copy() for name, column in head.columns.items()}
    columns["rewards"][0] += 1.0
    batch = Batch.parse(pack_head(head.manifest, columns, head.shard) + body[head.records_start :])
    with pytest.raises(InvalidRequest, match="column 'rewards' disagrees with its records"):
        batch.verify()


def test_methods_that_need_the_whole_batch_are_refused_for_a_shard() -> None:
    shard = shards_of(mixed_body(), 2)[0]
    for ask in (shard.agent_episodes, shard.moments, lambda: shard.recut(np.ones(len(shard.rows), bool))):
        with pytest.raises(
            InvalidRequest, match=r"shard 0 of 2 of batch b1\. .* only be computed from the whole batch"
        ):
            ask()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 7)), min_size=1, max_size=4))
def test_a_damaged_shard_raises_a_typed_error_or_can_be_read(flips: list[tuple[int, int]]) -> None:
    body = bytearray(bodies_of(usual_body(), 2)[0])
    for place, bit in flips:
        body[place % len(body)] ^= 1 << bit
    with contextlib.suppress(HeadraceError):
        Batch.parse(bytes(body)).verify()


def test_a_batch_has_at_least_one_shard() -> None:
    with pytest.raises(InvalidRequest, match="0 shards"):
        ShardedBatch(read_head(mixed_body()), 0)
    assert sharding.assign_bins([], 3).tolist() == []


def test_filler_rows_are_flagged_and_have_no_weight_tokens_or_turns() -> None:
    first, second = shards_of(body_of([group_of([make_trajectory(number=k, turns=2) for k in (1, 2, 3)])]), 2)
    assert first.shard is not None
    assert (len(first.rows), len(second.rows), first.shard.most_rows) == (2, 1, 2)
    rows = filled(second.rows, first.shard.most_rows, pad_token_id=9)
    (row, filler) = rows
    assert isinstance(filler, FillerRow)
    assert not isinstance(row, FillerRow)
    assert not np.any(filler.sampled)
    assert filler.turns == []
    assert filler.weights.sum() == filler.returns.size == filler.rewards.size == 0
    for layout in (packed(rows), packed(rows, shift=True), padded(rows, side="right"), padded(rows, side="left")):
        alone = packed(second.rows)
        assert layout.mask.sum() == alone.mask.sum()
        assert layout.advantages.sum() == alone.advantages.sum()
        assert set(layout.row_ids.ravel().tolist()) == {0, -1}
    assert scalar_advantages(rows)[1] == 0.0
    assert second.manifest.counts.rows == 3, "the manifest knows nothing of fillers"
    with pytest.raises(InvalidRequest, match="3 rows are more than 2"):
        filled([row, row, row], 2)

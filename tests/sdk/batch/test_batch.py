from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.batch.batch import Batch
from headrace.batch.body import read_advantages
from headrace.batch.build import build_head, compute
from headrace.batch.estimator_inputs import AgentEpisodes, GroupInput, collect_agent_episodes
from headrace.errors import EstimatorFailed, InvalidRequest, InvalidTrajectory
from headrace.estimators import gae_turn
from headrace.moments import Moments, merge_all
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Task, Trajectory, Version
from headrace.wire.codec import decode_head, encode
from tests.builders import (
    make_failed,
    make_multi_agent,
    make_multi_segment,
    make_segment,
    make_trajectory,
    make_truncated,
)

Make = Callable[[int], Trajectory]
MAKERS: dict[str, Make] = {
    "single-turn": lambda k: make_trajectory(number=k, rewards=[k % 3]),
    "multi-turn": lambda k: make_trajectory(number=k, rewards=[0.5 * (k % 2), 0.0, k % 3][: 1 + k % 3]),
    "truncated": lambda k: make_truncated(number=k, rewards=[k % 2, 1.0]),
    "multi-segment": lambda k: make_multi_segment(number=k, rewards=(0.5, -0.25 * k, 1.0)),
    "frozen opponent": lambda k: make_multi_agent(number=k, rewards=(0.0, k % 2)),
    "both train": lambda k: make_multi_agent(number=k, rewards=(0.0, k % 2), opponent_trains=True),
}
ESTIMATORS = ("none", "reinforce", "rebn", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
NOW = Version(0, 3)


def group_of(
    trajectories: Sequence[Trajectory], *, name: str = "g", expected: int | None = None, environment: str = "test:Echo"
) -> tuple[GroupInput, bytes]:
    records = [encode(trajectory) for trajectory in trajectories]
    members = [(decode_head(record), len(record)) for record in records]
    task = Task(environment=environment, seed=7)
    return GroupInput(name, task, len(members) if expected is None else expected, members), b"".join(records)


def body_of(groups: Sequence[tuple[GroupInput, bytes]], **estimator: Any) -> bytes:
    spec = EstimatorSpec(**{"name": "grpo", "eps": 0.0, **estimator})
    head = build_head(batch="b1", run="run", estimator=spec, version=NOW, groups=[group for group, _ in groups])
    return head + b"".join(records for _, records in groups)


@functools.cache
def usual_body(make: str = "multi-turn", name: str = "rebn", gamma: float = 0.5) -> bytes:
    numbers = iter(range(1, 100))
    groups = [
        group_of(
            [MAKERS[make](next(numbers)) for _ in range(size)], name=f"g{size}", expected=3, environment=f"e:{size % 2}"
        )
        for size in (3, 1, 2)
    ]
    return body_of(groups, name=name, gamma=gamma)


# Forming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("make", MAKERS)
def test_a_batch_agrees_with_its_own_manifest(make: str, name: str) -> None:
    batch = Batch.parse(usual_body(make, name))
    batch.verify()
    counts = batch.manifest.counts
    assert (counts.trajectories, counts.groups) == (6, 3)
    assert counts.rows == len(batch.rows)
    assert counts.turns == sum(len(row.turns) for row in batch.rows)
    assert counts.sampled_tokens == sum(int(row.sampled.sum()) for row in batch.rows)
    assert counts.tokens == sum(len(row.token_ids) for row in batch.rows)
    assert batch.moments() == batch.manifest.moments


def test_the_same_groups_give_the_same_bytes() -> None:
    usual_body.cache_clear()
    first = usual_body("both train", "grpo")
    usual_body.cache_clear()
    assert usual_body("both train", "grpo") == first


def test_records_are_served_unchanged() -> None:
    group, records = group_of([make_trajectory(number=k, turns=k) for k in (1, 2, 3)])
    body = body_of([(group, records)])
    assert body.endswith(records)
    batch = Batch.parse(body)
    assert [record.nbytes for record in batch._record_views()] == [size for _, size in group.members]
    assert all(offset % 64 == 0 for offset in batch.columns["record_offsets"])
    assert (len(body) - len(records)) % 64 == 0


def test_the_unit_of_gamma_and_ddof_and_eps_are_stated_in_the_manifest() -> None:
    manifest = Batch.parse(usual_body("multi-segment", "grpo", 0.9)).manifest
    assert msgspec.to_builtins(manifest.estimator) == {
        "name": "grpo",
        "gamma": 0.9,
        "gamma_unit": "turn",
        "ddof": 0,
        "eps": 0.0,
        "weighting": "turn",
    }
    assert (manifest.version_min, manifest.version_max) == (Version(0, 1), Version(0, 2))
    assert (manifest.staleness_min, manifest.staleness_max) == (2, 2)
    assert manifest.schema == 1
    assert len(manifest.trajectories) == 6


def test_staleness_is_relative_to_the_lowest_version_of_the_groups_rows() -> None:
    old = [make_trajectory(number=1, version=Version(0, 1)), make_trajectory(number=2, version=Version(0, 3))]
    new = [make_trajectory(number=3, version=Version(0, 3))]
    manifest = Batch.parse(body_of([group_of(old, name="old"), group_of(new, name="new")])).manifest
    assert [(group.low, group.staleness) for group in manifest.groups] == [(Version(0, 1), 2), (Version(0, 3), 0)]
    assert (manifest.staleness_min, manifest.staleness_max) == (0, 2)


def test_a_frozen_opponents_version_does_not_count() -> None:
    opponent = make_segment(agent="opponent", train=False, version=Version(0, 0), indices=[0], terminated=False)
    player = make_segment(agent="player", version=Version(0, 2), indices=[1])
    manifest = Batch.parse(body_of([group_of([make_trajectory(segments=[opponent, player])])])).manifest
    assert manifest.staleness_max == 1


def test_a_group_states_if_it_is_complete_single_or_without_variance() -> None:
    groups = [
        group_of([make_trajectory(number=k, rewards=[k]) for k in (1, 2)], name="short", expected=4),
        group_of([make_trajectory(number=3)], name="alone", expected=1),
        group_of([make_trajectory(number=k, rewards=[0.1]) for k in (4, 5, 6)], name="flat"),
    ]
    entries = Batch.parse(body_of(groups)).manifest.groups
    assert [(g.expected, g.actual, g.complete, g.single, g.zero_variance) for g in entries] == [
        (4, 2, False, False, False),
        (1, 1, True, True, False),
        (3, 3, True, False, True),
    ]
    assert entries[0].agents == {"agent": Moments(2.0, 1.5, 0.5)}


def test_moments_count_each_trajectory_and_agent_once() -> None:
    members = [make_multi_segment(number=k, rewards=(0.5, -0.25, float(k))) for k in (1, 2)]
    batch = Batch.parse(body_of([group_of(members)], gamma=0.5))
    assert batch.manifest.counts.rows == 4
    assert batch.manifest.moments.rewards == Moments.of([1.25, 2.25])
    assert batch.manifest.moments.returns_by_turn.n == 6
    assert batch.manifest.moments.returns_by_token.n == 2 * (4 + 4 + 3)


def test_returns_cover_all_turns_of_an_agent() -> None:
    first = make_segment(spans=[(2, 4)], rewards=[1.0], indices=[0], terminated=False)
    scratch = make_segment(spans=[(2, 9)], rewards=[4.0], indices=[1], terminated=False, train=False)
    last = make_segment(spans=[(2, 5)], rewards=[8.0], indices=[2])
    batch = Batch.parse(
        body_of([group_of([make_trajectory(segments=[first, scratch, last])])], name="reinforce", gamma=0.5)
    )
    assert [row.returns.tolist() for row in batch.rows] == [[1.0 + 0.5 * (4.0 + 0.5 * 8.0)], [8.0]]
    assert batch.manifest.counts.turns == 2
    assert batch.manifest.moments.rewards == Moments(1.0, 13.0, 0.0)


def test_an_agent_episode_without_rows_is_omitted_such_as_that_of_a_frozen_opponent() -> None:
    members = [make_multi_agent(number=k, rewards=(0.0, k), opponent_rewards=(50.0, -99.0 * k)) for k in (1, 2)]
    batch = Batch.parse(body_of([group_of(members)]))
    assert batch.manifest.groups[0].agents == {"player": Moments(2.0, 1.5, 0.5)}
    assert [row.segment.agent for row in batch.rows] == ["player", "player"]
    assert [row.advantages.tolist() for row in batch.rows] == [[-1.0, -1.0], [1.0, 1.0]]


def test_agents_are_compared_with_the_same_agent_of_other_members() -> None:
    members = [
        make_multi_agent(number=k, rewards=(0.0, k), opponent_rewards=(0.0, -10.0 * k), opponent_trains=True)
        for k in (1, 2)
    ]
    batch = Batch.parse(body_of([group_of(members)], name="dr_grpo"))
    assert batch.manifest.groups[0].agents == {"player": Moments(2.0, 1.5, 0.5), "opponent": Moments(2.0, -15.0, 50.0)}
    assert [row.advantages[0] for row in batch.rows] == [-0.5, 5.0, 0.5, -5.0]


def test_the_moments_of_environments_merge_to_those_of_the_batch() -> None:
    manifest = Batch.parse(usual_body()).manifest
    assert set(manifest.environments) == {"e:0", "e:1"}
    for name in ("returns_by_turn", "returns_by_token", "rewards"):
        merged = merge_all(getattr(moments, name) for moments in manifest.environments.values())
        whole = getattr(manifest.moments, name)
        np.testing.assert_allclose(msgspec.structs.astuple(merged), msgspec.structs.astuple(whole), rtol=1e-12)


def test_a_segment_without_turns_is_not_a_row() -> None:
    silent = make_segment(agent="silent", spans=[])
    batch = Batch.parse(body_of([group_of([make_trajectory(segments=[silent, make_segment()])])]))
    batch.verify()
    assert [row.segment.agent for row in batch.rows] == ["agent"]


def test_a_batch_may_have_no_rows() -> None:
    empty = make_truncated(segments=[], stop_reason="max_tokens", tokenizer=None)
    batch = Batch.parse(body_of([group_of([empty])]))
    batch.verify()
    assert batch.rows == []
    assert batch.manifest.version_min is None
    Batch.parse(body_of([])).verify()


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_failed_trajectory_is_refused(status: str) -> None:
    failed = make_failed(number=2, status=status, stop_reason="failure" if status == "failed" else "cancelled")
    with pytest.raises(InvalidRequest, match=f"is {status} and cannot be in a batch"):
        body_of([group_of([make_trajectory(), failed])])


# Reading --------------------------------------------------------------------------------------------------------


def test_a_learner_reads_a_batch_without_a_copy() -> None:
    body = usual_body()
    base = np.frombuffer(body, np.uint8)
    batch = Batch.parse(body)
    row = batch.rows[0]
    for array in (*batch.columns.values(), row.token_ids, row.logprobs, row.sampled, row.returns, row.advantages):
        assert not array.flags.writeable
        assert np.shares_memory(array, base)


def test_each_row_has_its_own_advantages_at_its_own_sampled_positions() -> None:
    for make in MAKERS:
        for row in Batch.parse(usual_body(make, "reinforce")).rows:
            expected = np.zeros(len(row.token_ids), np.float32)
            for turn, advantage in zip(row.turns, row.advantages, strict=True):
                expected[turn.start : turn.end] = advantage
            computed = row.token_advantages()
            assert computed.dtype == np.float32
            np.testing.assert_array_equal(computed, expected)
            assert not np.any(computed[row.sampled == 0])


def test_a_row_has_its_trajectory_segment_and_group() -> None:
    batch = Batch.parse(usual_body("both train", "grpo"), generation=4, lease_s=30.0)
    assert (batch.id, batch.run, batch.version, batch.generation, batch.lease_s) == ("b1", "run", NOW, 4, 30.0)
    assert [row.index for row in batch.rows] == list(range(12))
    assert [row.group.id for row in batch.rows[::2]] == ["g3", "g3", "g3", "g1", "g2", "g2"]
    row = batch.rows[3]
    assert row.trajectory is batch.trajectories[1]
    assert row.segment is row.trajectory.segments[1]
    assert (row.temperature, row.versions) == (1.0, row.segment.versions)


def test_token_weighting_sets_the_weights_of_turns() -> None:
    rows = Batch.parse(usual_body("multi-segment", "reinforce_pp")).rows
    assert [row.weights.tolist() for row in rows[:2]] == [[4.0, 4.0], [3.0]]
    rows = Batch.parse(usual_body("multi-segment", "rebn")).rows
    assert [row.weights.tolist() for row in rows[:2]] == [[1.0, 1.0], [1.0]]


def test_without_an_estimator_reading_advantages_is_an_error() -> None:
    batch = Batch.parse(usual_body("multi-turn", "none"))
    assert "advantages" not in batch.columns
    with pytest.raises(InvalidRequest, match="has no advantages"):
        batch.rows[0].token_advantages()


def test_row_turns_map_flat_values_to_the_columns() -> None:
    batch = Batch.parse(usual_body("both train", "reinforce"))
    agent_episodes = batch.agent_episodes()
    experience = agent_episodes.experience
    np.testing.assert_array_equal(experience.rewards[agent_episodes.row_turns], batch.columns["rewards"])
    gae = gae_turn(
        experience.rewards,
        np.zeros(len(experience.rewards)),
        experience.offsets,
        gamma_per_turn=batch.manifest.estimator.gamma,
        lambda_per_turn=1.0,
        terminated=agent_episodes.terminated,
    )
    np.testing.assert_allclose(gae.advantages[agent_episodes.row_turns], batch.columns["returns"])
    assert not gae.bootstrapped_with_zero.any()
    truncated = Batch.parse(usual_body("truncated")).agent_episodes()
    assert not truncated.terminated.any()


@pytest.mark.parametrize("indices", [(0, 1, 2), (0, 2, 4), (2, 1, 0)])
def test_a_row_is_collected_alike_with_and_without_a_segment_without_turns(indices: tuple[int, ...]) -> None:
    head = decode_head(encode(make_trajectory(rewards=[0.5, -1.0, 2.0])))
    (row,) = head.segments
    turns = [replace(turn, index=index) for turn, index in zip(row.turns, indices, strict=True)]
    row = replace(row, turns=turns)
    entries = [
        collect_agent_episodes([GroupInput("g", head.task, 2, [(replace(head, segments=segments), 64)] * 2)])
        for segments in ([row], [row, replace(row, turns=[])])
    ]
    alone, beside = map(_plain, entries)
    assert alone == beside


def _plain(agent_episodes: AgentEpisodes) -> list[Any]:
    fields = (*agent_episodes.experience, *agent_episodes[1:])
    return [field.tolist() if isinstance(field, np.ndarray) else field for field in fields]


# Refusing -------------------------------------------------------------------------------------------------------


def forged(body: bytes, change: Callable[[Any, dict[str, Any]], None]) -> bytes:
    """The body with its manifest (as builtins) and columns changed by the given function."""
    batch = Batch.parse(body)
    manifest = msgspec.to_builtins(batch.manifest)
    columns = {name: column.copy() for name, column in batch.columns.items()}
    change(manifest, columns)
    table, data, offset = [], b"", 0
    for name, column in columns.items():
        raw = column.tobytes()
        raw += bytes(-len(raw) % 64)
        table.append({"name": name, "dtype": column.dtype.str, "length": len(column), "offset": offset})
        data, offset = data + raw, offset + len(raw)
    head = msgspec.msgpack.encode({"manifest": manifest, "columns": table})
    start = -(-(24 + len(head)) // 64) * 64
    prefix = (
        b"HRTB" + (1).to_bytes(4, "little") + len(head).to_bytes(8, "little") + (start + offset).to_bytes(8, "little")
    )
    return (prefix + head).ljust(start, b"\0") + data + batch.records


def set_count(name: str, value: int) -> Callable[[Any, Any], None]:
    return lambda manifest, columns: manifest["counts"].__setitem__(name, value)


@pytest.mark.parametrize("name", ["rows", "trajectories", "groups", "turns", "sampled_tokens", "tokens"])
@pytest.mark.parametrize("value", [-1, 0, 1000])
def test_counts_that_disagree_with_the_manifest_are_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidRequest, match=r"disagrees with its manifest|not a batch"):
        Batch.parse(forged(usual_body(), set_count(name, value)))


def test_sizes_that_disagree_with_the_manifest_are_refused() -> None:
    body = usual_body()
    for wrong in (body[:-64], body + bytes(64)):
        with pytest.raises(InvalidRequest, match="disagrees"):
            Batch.parse(wrong)
    with pytest.raises(InvalidRequest, match=r"record 0 has \d+ bytes"):
        Batch.parse(forged(body, lambda manifest, columns: columns["record_offsets"].__setitem__(1, 64)))


def test_a_row_that_points_outside_the_batch_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="points outside"):
        Batch.parse(forged(usual_body(), lambda manifest, columns: columns["row_trajectory"].__setitem__(0, 6)))
    batch = Batch.parse(forged(usual_body(), lambda manifest, columns: columns["row_segment"].__setitem__(0, 1)))
    with pytest.raises(InvalidRequest, match="row 0 does not match segment 1 of trajectory 0"):
        _ = batch.rows


@pytest.mark.parametrize("column", ["returns", "advantages", "rewards", "turn_weights"])
def test_verify_recomputes_columns(column: str) -> None:
    batch = Batch.parse(forged(usual_body(), lambda manifest, columns: columns[column].__setitem__(2, 0.123)))
    with pytest.raises(InvalidRequest, match=f"column '{column}' disagrees with its records"):
        batch.verify()


def test_verify_recomputes_moments() -> None:
    def change(manifest: Any, columns: Any) -> None:
        n, mean, m2 = manifest["moments"]["rewards"]
        manifest["moments"]["rewards"] = [n, mean * (1 + 1e-10), m2]

    with pytest.raises(InvalidRequest, match=r"manifest.moments.rewards\[1\] is"):
        Batch.parse(forged(usual_body(), change)).verify()


def test_verify_detects_an_exchanged_record() -> None:
    group, records = group_of([make_trajectory(number=k, rewards=[k]) for k in (1, 2)])
    _, others = group_of([make_trajectory(number=k, rewards=[k]) for k in (2, 1)])
    body = body_of([(group, records)])
    with pytest.raises(InvalidRequest, match="disagrees"):
        Batch.parse(body[: -len(records)] + others).verify()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_damaged_body_raises_a_typed_error_or_can_be_read(flips: list[tuple[int, int]]) -> None:
    body = bytearray(usual_body())
    for position, mask in flips:
        body[position % len(body)] ^= mask
    with contextlib.suppress(InvalidRequest, InvalidTrajectory, EstimatorFailed):
        batch = Batch.parse(bytes(body))
        batch.verify()
        _ = batch.rows


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 20))
def test_a_truncated_body_is_refused(length: int) -> None:
    body = usual_body()
    with pytest.raises(InvalidRequest):
        Batch.parse(body[: length % len(body)])


def test_the_error_names_another_magic_or_schema() -> None:
    with pytest.raises(InvalidRequest, match="starts with b'HRTJ'"):
        Batch.parse(encode(make_trajectory()))
    other = bytearray(usual_body())
    other[4] = 9
    with pytest.raises(InvalidRequest, match="wire schema is 9, this version reads 1"):
        Batch.parse(other)


def test_compute_and_build_agree() -> None:
    group, records = group_of([make_trajectory(number=k, rewards=[k]) for k in (1, 2)])
    spec = EstimatorSpec(name="rloo")
    computed = compute(batch="b1", run="run", estimator=spec, version=NOW, groups=[group])
    assert computed.manifest == Batch.parse(body_of([(group, records)], name="rloo", eps=1e-9)).manifest


@pytest.mark.parametrize("make", MAKERS)
def test_the_advantages_of_a_trajectory_are_read_from_the_head_alone(make: str) -> None:
    body = usual_body(make)
    batch = Batch.parse(body)
    head = body[: len(body) - len(batch.records)]
    for trajectory in batch.trajectories:
        rows = [row for row in batch.rows if row.trajectory is trajectory or row.trajectory.id == trajectory.id]
        advantages = read_advantages(head, trajectory.id)
        assert len(advantages) == len(rows)
        for by_head, row in zip(advantages, rows, strict=True):
            assert trajectory.segments[by_head.segment].turns == row.turns
            np.testing.assert_array_equal(by_head.returns, row.returns)
            np.testing.assert_array_equal(by_head.advantages, row.advantages)
    assert read_advantages(head, "of another batch") == []


@pytest.mark.parametrize("name", ESTIMATORS[1:])
def test_nothing_infinite_leaves_a_batch(name: str) -> None:
    rewards = (1e12, -1e12, 1e12, 0.0)
    group = group_of([make_trajectory(number=k, rewards=[reward, reward]) for k, reward in enumerate(rewards, 1)])
    batch = Batch.parse(body_of([group], name=name))
    for row in batch.rows:
        assert np.isfinite(row.token_advantages()).all()
    assert all(np.isfinite(column.astype(np.float32)).all() for column in batch.columns.values())
    moments = [moments for agents in batch.manifest.groups for moments in agents.agents.values()]
    assert np.isfinite(np.array([(m.n, m.mean, m.m2) for m in moments], np.float32)).all()


def test_an_advantage_that_is_infinite_in_float32_is_refused() -> None:
    group = group_of([make_trajectory(number=1, rewards=[1e60])])  # as an earlier version accepted it
    (row,) = Batch.parse(body_of([group], name="reinforce")).rows
    with pytest.raises(InvalidRequest, match="1e\\+60 does not fit into float32"):
        row.token_advantages()

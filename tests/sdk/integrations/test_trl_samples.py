"""Samples for TRL's asynchronous trainer, with the episodes of case G24."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from headrace.batch.batch import Batch
from headrace.errors import InvalidRequest
from headrace.integrations.trl_samples import RolloutSample, samples
from headrace.trajectory import Sampling, Version, VersionRun
from tests.builders import make_segment, make_trajectory
from tests.sdk.batch.batches import batch_of, g24_trajectories


class Term(NamedTuple):
    """One term of TRL's loss: the output at ``position`` predicts ``token``."""

    position: int
    token: int
    old_logprob: float
    advantage: float


def terms(sample: RolloutSample) -> list[Term]:
    """The terms of TRL's loss for a sample, as ``TreeRow.pack`` of trl 1.16 computes them."""
    return [
        Term(p - 1, int(sample.input_ids[p]), float(sample.old_log_probs[p]), sample.advantage)
        for p in range(1, len(sample.input_ids))
        if sample.completion_mask[p]
    ]


def of(batch: Batch, *, first_version: int = 0, first_group: int = 0) -> list[RolloutSample]:
    return list(samples(batch, first_version=first_version, first_group=first_group, now_s=7.0))


@pytest.mark.parametrize(
    ("name", "rewards", "advantages", "total"),
    [("grpo", (0.0, 0.0, 1.0), (1.0, 1.0, 1.0), 28.0), ("reinforce", (0.75, -2.25, 2.0), (0.5, -0.25, 2.0), 3.5)],
)
def test_the_loss_of_trl_has_each_advantage_at_its_rows_own_tokens(
    name: str, rewards: tuple[float, float, float], advantages: tuple[float, ...], total: float
) -> None:
    batch = batch_of(g24_trajectories(rewards, 0.0), name=name)
    samples_terms = [terms(sample) for sample in of(batch)]
    assert [len(row) for row in samples_terms[:3]] == [5, 20, 3]
    for row, read, advantage in zip(batch.rows, samples_terms, advantages, strict=False):
        (turn,) = row.turns
        assert [term.position for term in read] == list(range(turn.start - 1, turn.end - 1))
        assert [term.token for term in read] == row.token_ids[turn.start : turn.end].tolist()
        assert [term.old_logprob for term in read] == row.logprobs[turn.start : turn.end].tolist()
        assert {term.advantage for term in read} == {advantage}
    assert sum(term.advantage for row in samples_terms[:3] for term in row) == total


def test_a_row_whose_turns_differ_becomes_a_sample_for_each_turn_and_no_token_is_trained_on_twice() -> None:
    spans = [(40, 45), (55, 75), (80, 83)]
    segment = make_segment(spans=spans, length=90, rewards=[0.75, -2.25, 2.0])
    samples = of(batch_of([make_trajectory(segments=[segment])], name="reinforce"))
    assert [(len(sample.input_ids), sample.advantage) for sample in samples] == [(45, 0.5), (75, -0.25), (83, 2.0)]
    read = [term for sample in samples for term in terms(sample)]
    assert [term.position for term in read] == [p - 1 for start, end in spans for p in range(start, end)]
    assert sum(term.advantage for term in read) == 3.5


def test_a_row_whose_turns_agree_is_one_sample() -> None:
    (sample,) = of(batch_of([make_trajectory(rewards=[0.0, 1.0])], name="reinforce"))
    assert sample.advantage == 1.0
    assert sample.completion_mask.sum() == 8


def test_mask_and_logprobs_have_the_length_of_the_tokens_and_the_dtypes_of_trl() -> None:
    (sample,) = of(batch_of([make_trajectory(truncated=True)], name="reinforce"))
    arrays = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
    assert [array.dtype.str for array in arrays] == ["<i8", "<i8", "<f4"]
    assert {len(array) for array in arrays} == {13}
    assert not sample.old_log_probs[sample.completion_mask == 0].any()
    assert all(array.flags.owndata for array in arrays), "or the batch would stay in memory"


def test_the_version_of_a_sample_is_that_of_its_oldest_token_in_the_trainers_count() -> None:
    segment = make_segment(versions=[VersionRun(7, 0, 4), VersionRun(10, 0, 6)])
    batch = batch_of([make_trajectory(segments=[segment])], name="reinforce", version=Version(0, 6))
    assert [sample.model_version for sample in of(batch)] == [4]
    assert [sample.model_version for sample in of(batch, first_version=5)] == [-1]


def test_groups_are_numbered_across_batches() -> None:
    batch = batch_of([make_trajectory(number=1), make_trajectory(number=2)], name="grpo")
    assert [sample.group_id for sample in of(batch, first_group=3)] == [3, 3]


def test_messages_are_split_at_the_policys_first_turn() -> None:
    (sample,) = of(batch_of([make_trajectory()], name="reinforce"))
    assert sample.prompt == [{"role": "user", "content": "Say hello."}]
    assert sample.completion == [{"role": "assistant", "content": "hello"}]
    assert (sample.metrics, sample.enqueued_at) == ({"reward": 1.0}, 7.0)


def test_a_row_that_samples_its_first_token_is_refused() -> None:
    segment = make_segment(spans=[(0, 4)])
    with pytest.raises(InvalidRequest, match="samples its first token, which TRL omits"):
        of(batch_of([make_trajectory(segments=[segment])], name="reinforce"))


def test_logprobs_before_a_temperature_that_trl_would_apply_are_refused() -> None:
    segment = make_segment(temperature=0.7)
    with pytest.raises(InvalidRequest, match=r"sampled at temperature 0\.7"):
        of(batch_of([make_trajectory(segments=[segment])], name="reinforce"))


def test_logprobs_before_a_filter_are_refused_and_those_after_it_are_taken() -> None:
    def with_sampling(sampling: Sampling) -> Batch:
        segment = msgspec.structs.replace(make_segment(), sampling=sampling)
        return batch_of([make_trajectory(segments=[segment])], name="reinforce")

    with pytest.raises(InvalidRequest, match=r"and top_p 0\.5, and its logprobs are those before both"):
        of(with_sampling(Sampling(top_p=0.5)))
    assert of(with_sampling(Sampling(top_p=0.5, logprobs="processed")))


def test_a_run_without_an_estimator_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="choose an estimator in the run spec"):
        of(batch_of([make_trajectory()], name="none"))


def test_the_loss_of_a_batch_covers_exactly_the_sampled_tokens() -> None:
    trajectories = [make_trajectory(number=k, turns=k) for k in (1, 2, 3)]
    batch = batch_of(trajectories, name="rebn")
    read = [term for sample in of(batch) for term in terms(sample)]
    assert len(read) == batch.manifest.counts.sampled_tokens
    expected = np.concatenate([row.token_advantages()[row.sampled == 1] for row in batch.rows])
    np.testing.assert_allclose(sorted(term.advantage for term in read), sorted(expected), rtol=1e-6)

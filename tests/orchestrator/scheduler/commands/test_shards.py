"""One batch for all ranks of a data-parallel learner."""

from __future__ import annotations

import pytest

from headrace.errors import BatchSuperseded, InvalidRequest, ShardsNotFetched
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import codes
from tests.orchestrator.scheduler.scenarios import pull_all_shards


def test_the_same_request_of_the_ranks_that_share_a_session_is_answered_with_shards_of_one_batch(harness):
    harness.run(batch_size=2)
    harness.work()
    first, second = pull_all_shards(harness, "pull-0"), pull_all_shards(harness, "pull-1")
    assert len({(batch.id, batch.generation) for batch in first}) == 1
    assert len({(batch.id, batch.generation) for batch in second}) == 1
    assert first[0].id != second[0].id
    assert len(harness.events_of(events.BatchLeased)) == 2, "one lease a batch"
    harness.ack(first[3])
    harness.ack(second[0])
    assert harness.status().batches_acked == 2


def test_a_plan_says_which_shard_is_served(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.batch(request="1", shard=2, shards=4)
    wanted = messages.PullRequest(learner="l", session="s", request="1", shard=3, shards=4)
    plan = harness.core.pull("r", wanted, harness.now)
    harness.settle()
    assert (plan.shard, plan.shards) == (3, 4)


def test_an_ack_before_every_shard_was_fetched_is_refused_and_the_error_names_the_missing_shards(harness):
    harness.run(batch_size=2)
    harness.work()
    batch = harness.batch(request="1", shard=1, shards=4)
    harness.restart()
    with pytest.raises(ShardsNotFetched, match="shards 0, 2, 3 of 4 were not fetched") as refused:
        harness.ack(batch)
    assert refused.value.extra["missing"] == [0, 2, 3]
    for shard in (0, 2):
        harness.batch(request="1", shard=shard, shards=4)
    harness.restart(harness.restored(harness.core.snapshot()))
    with pytest.raises(ShardsNotFetched, match="shard 3 of 4 was not fetched"):
        harness.ack(batch)
    harness.batch(request="1", shard=3, shards=4)
    harness.ack(batch)


def test_a_repeated_pull_of_a_rank_gets_the_same_and_changes_nothing(harness):
    harness.run(batch_size=2)
    harness.work()
    first = pull_all_shards(harness, "1")
    before = len(harness.log)
    assert {batch.id for batch in pull_all_shards(harness, "1")} == {first[0].id}
    assert len(harness.log) == before


def test_the_reasons_of_an_empty_answer_name_the_missing_rank(harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.work()
    harness.batch(request="1", shard=0, shards=3)
    harness.batch(request="1", shard=2, shards=3)
    reply = harness.empty(request="2", shard=0, shards=3)
    assert "shards-not-fetched" in codes(reply)
    (reason,) = [reason for reason in reply.reasons if reason.code == "shards-not-fetched"]
    assert "shard 1 of 3 was not fetched" in reason.message
    assert reason.facts["missing"] == [1]
    assert "'l'" in reason.message


def test_a_late_rank_renews_the_lease_of_its_session(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch(request="1", shard=0, shards=2)
    harness.advance(100.0)
    assert harness.events_of(events.BatchReleased)
    late = harness.batch(request="1", shard=1, shards=2)
    assert (late.id, late.generation) == (first.id, first.generation)
    harness.restart()
    harness.ack(first)


@pytest.mark.parametrize("end", ["nacked", "dissolved", "taken over"])
def test_a_rank_that_requests_a_batch_that_is_over_gets_an_error(harness, end):
    harness.run(batch_size=2, max_staleness=0 if end == "dissolved" else 1, batch_lease_s=100)
    harness.work()
    first = harness.batch(request="1", shard=0, shards=2)
    if end == "taken over":
        harness.advance(100.0)
        harness.batch("t", learner="other")
    elif end == "dissolved":
        harness.announce("0.1")
        harness.nack(first)
    else:
        harness.nack(first)
    end_text = {"nacked": "nacked: out of memory", "dissolved": "was dissolved", "taken over": "was leased again"}[end]
    harness.restart()
    with pytest.raises(BatchSuperseded, match=end_text):
        harness.pull(request="1", shard=1, shards=2)
    assert harness.settle() == []
    if end == "nacked":  # all ranks continue with their next pull
        assert {batch.id for batch in pull_all_shards(harness, "2", 2)} == {first.id}


def test_a_restart_with_another_number_of_ranks_gets_the_same_batch_in_other_views(harness):
    harness.run(batch_size=2)
    harness.work()
    first = pull_all_shards(harness, "pull-0", 4)
    again = pull_all_shards(harness, "pull-0", 3, session="again")
    assert {(batch.id, batch.generation) for batch in again} == {(first[0].id, 2)}
    with pytest.raises(BatchSuperseded):
        harness.ack(first[0])
    harness.ack(again[2])


def test_ranks_that_disagree_on_their_number_are_refused(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.batch(request="1", shard=0, shards=4)
    with pytest.raises(InvalidRequest, match="in 4 shards; this pull is for shard 1 of 3"):
        harness.pull(request="1", shard=1, shards=3)
    for shard, shards in ((-1, 2), (2, 2), (0, 0), (0, 5000)):
        with pytest.raises(InvalidRequest, match=f"Shard {shard} of {shards}"):
            harness.pull(request="2", shard=shard, shards=shards)
    assert harness.settle() == []


def test_submitted_groups_are_awaited_in_shards(harness):
    harness.run(batch_size=2, group_size=2)
    harness.submit("a", "b")
    harness.work()
    found = [harness.batch(request="1", groups=["b", "a"], shard=shard, shards=2) for shard in (1, 0)]
    assert found[0].id == found[1].id
    assert sorted(found[0].groups) == ["a", "b"]
    harness.ack(found[0])


def test_the_ack_of_a_batch_that_was_given_back_is_refused_with_the_reason(harness):
    harness.run(batch_size=2)
    harness.work()
    batch = harness.batch()
    harness.nack(batch)
    with pytest.raises(BatchSuperseded, match=r"lease of batch \w+ is over: nacked: out of memory"):
        harness.ack(batch)

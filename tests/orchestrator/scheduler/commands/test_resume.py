"""Batches that a restarted learner gets back."""

from __future__ import annotations

import pytest

from headrace.errors import BatchSuperseded, SessionSuperseded, ShardsNotFetched
from headrace.wire import messages
from tests.orchestrator.scheduler.harness import Harness, ServedBatch


def resumed(harness: Harness, session: str, **fields: int) -> list[ServedBatch]:
    return [harness.batch(session, batch=id) for id in harness.resume(session, **fields).batches]


def test_it_gets_exactly_the_batches_that_its_earlier_sessions_leased_and_never_acked(harness):
    harness.run(batch_size=2, max_staleness=3)
    harness.work()
    held = [harness.batch("old") for _ in range(3)]
    other = harness.batch("x", learner="other")
    harness.ack(held[0])
    harness.work()
    harness.restart()
    again = resumed(harness, "new")
    assert [batch.id for batch in again] == [batch.id for batch in held[1:]]
    assert [batch.generation for batch in again] == [2, 2]
    harness.ack(again[0])
    harness.ack(other)
    assert harness.resume("new").batches == [again[1].id], "a batch that was acked meanwhile is left out"
    assert harness.batch("new").id not in {batch.id for batch in (*held, other)}


def test_the_reply_names_the_others_with_the_reason(harness):
    harness.run(batch_size=2, max_staleness=1, batch_lease_s=100)
    harness.work()
    stale, taken = harness.batch("old"), harness.batch("old")
    harness.advance(100.0)
    assert harness.batch("x", learner="other").id == stale.id
    assert harness.resume("new").lost == {stale.id: "taken over by learner 'other'"}
    harness.announce("0.2")
    harness.restart(harness.restored(harness.core.snapshot()))
    reply = harness.resume("newer")
    assert reply.batches == []
    assert reply.lost == {stale.id: "taken over by learner 'other'", taken.id: "stale"}


def test_batches_that_it_nacked_are_not_among_them(harness):
    harness.run(batch_size=2)
    harness.work()
    batch = harness.batch("old")
    harness.nack(batch)
    reply = harness.resume("new")
    assert (reply.batches, reply.lost) == ([], {})
    assert harness.batch("new").id == batch.id, "it waits for the next pull"


def test_a_repeated_request_of_the_same_session_gets_the_same_reply(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.batch("old")
    first = harness.resume("new")
    harness.restart()
    assert harness.resume("new") == first
    assert harness.resume("newest").batches == first.batches, "and the next process gets it in turn"


def test_all_ranks_resume_and_each_fetches_its_shard(harness):
    harness.run(batch_size=2)
    harness.work()
    old = [harness.batch("old", request="pull-0", shard=shard, shards=3) for shard in range(3)]
    names = [harness.resume("new", shards=2).batches for _ in range(2)]
    assert names == [[old[0].id]] * 2
    first = harness.batch("new", batch=names[0][0], shard=0, shards=2)
    assert (first.id, first.generation) == (old[0].id, 2)
    with pytest.raises(ShardsNotFetched):
        harness.ack(first)
    harness.batch("new", batch=names[0][0], shard=1, shards=2)
    harness.ack(first)
    with pytest.raises(BatchSuperseded):
        harness.ack(old[0])


def test_a_resumed_batch_that_was_not_fetched_cannot_be_acked(harness):
    harness.run(batch_size=2)
    harness.work()
    old = harness.batch("old")
    harness.resume("new")
    old.session, old.generation = "new", 2
    with pytest.raises(ShardsNotFetched):
        harness.ack(old)


def test_a_pull_that_names_a_batch_gets_it_or_an_error_with_its_end(harness):
    harness.run(batch_size=2)
    harness.work()
    old = harness.batch("old")
    harness.resume("new")
    with pytest.raises(BatchSuperseded, match="was leased again"):
        harness.pull("x", learner="other", batch=old.id)
    harness.ack(harness.batch("new", batch=old.id))
    with pytest.raises(BatchSuperseded, match="it was acked"):
        harness.pull("new", batch=old.id)
    with pytest.raises(BatchSuperseded, match="is unknown"):
        harness.pull("new", batch="none")
    assert harness.settle() == []


def test_from_then_on_requests_of_earlier_sessions_are_refused(harness):
    harness.run(batch_size=2, max_staleness=3)
    harness.work()
    harness.ack(harness.batch("old"))
    harness.work()
    request = messages.PullRequest(learner="l", session="old", request="sent before it died")
    plan = harness.core.pull("r", request, harness.now)
    assert harness.resume("new").batches == []
    with pytest.raises(SessionSuperseded):
        harness.core.form("r", plan, request, harness.now)
    harness.restart(harness.restored(harness.core.snapshot()))
    with pytest.raises(SessionSuperseded):
        harness.pull("old")
    assert harness.resume("new").batches == [], "every rank gets the same reply"

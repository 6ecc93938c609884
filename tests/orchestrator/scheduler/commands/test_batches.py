"""Ends of batch leases: ack, nack, expiry, dissolution."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    UnknownBatch,
    VersionConflict,
)
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import version


def test_a_leased_batch_that_went_stale_meanwhile_may_still_be_acked(harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.work()
    first = harness.batch()
    harness.announce("0.3")
    assert harness.ack(first, "0.4").version == "0.4"
    assert harness.retired() == dict.fromkeys(first.groups, "acked")


def test_until_it_is_redelivered_its_holder_may_ack_a_batch_whose_lease_ran_out(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch()
    harness.advance(150.0)
    harness.announce("0.1")
    harness.announce("0.2")
    assert harness.ack(first).batch == first.id
    with pytest.raises(BatchAlreadyAcked):
        harness.nack(first)


def test_a_repeated_ack_of_the_same_session_and_generation_gets_the_same_answer(harness):
    harness.run(batch_size=2)
    harness.work()
    first = harness.batch()
    reply = harness.ack(first, "0.1")
    harness.announce("0.2")
    before = harness.core.durable()
    assert harness.ack(first, "0.1") == reply
    assert harness.core.durable() == before
    first.session = "another"
    with pytest.raises(BatchAlreadyAcked, match="session 's' in generation 1"):
        harness.ack(first, "0.1")
    first.id = "nothing"
    with pytest.raises(UnknownBatch):
        harness.ack(first)


def test_an_ack_announces_the_version_that_the_step_made_in_the_same_event(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.ack(harness.batch(), "0.1")
    (acked,) = harness.events_of(events.BatchAcked)
    assert acked.version == version("0.1")
    assert harness.events_of(events.VersionAnnounced) == []
    assert harness.status().version == "0.1"


def test_an_ack_with_a_version_out_of_order_is_refused_and_changes_nothing(harness):
    harness.run(batch_size=2)
    harness.announce("0.5")
    harness.work()
    first = harness.batch()
    before = harness.core.durable()
    with pytest.raises(VersionConflict):
        harness.ack(first, "0.4")
    assert harness.core.durable() == before
    harness.ack(first, "0.5")


def test_an_ack_of_an_older_generation_is_always_superseded(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch(request="1")
    harness.advance(100.0)
    again = harness.batch(request="1")
    assert (again.id, again.generation) == (first.id, 2)
    with pytest.raises(BatchSuperseded):
        harness.ack(first, "0.1")
    harness.ack(again, "0.1")
    with pytest.raises(BatchSuperseded, match="acked in generation 2; this was generation 1"):
        harness.ack(first, "0.1")


@pytest.mark.parametrize("lapsed", [False, True])
def test_a_batch_leased_when_its_run_was_closed_may_still_be_acked(harness, lapsed):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    held, waiting = harness.batch(), harness.batch("other", learner="m")
    harness.nack(waiting)
    harness.core.close_run("r", harness.now)
    harness.settle()
    assert [event.batch for event in harness.events_of(events.BatchDissolved)] == [waiting.id]
    if lapsed:
        harness.advance(100.0)
        assert harness.events_of(events.BatchDissolved)[-1].batch == held.id
        with pytest.raises(BatchSuperseded):
            harness.ack(held, "0.1")
    else:
        assert harness.ack(held, "0.1").version == "0.1"
        assert set(held.groups) <= {group for group, reason in harness.retired().items() if reason == "acked"}
    assert harness.core.groups("r") == []


@pytest.mark.parametrize("state", ["leased", "lapsed", "released"])
def test_a_batch_that_was_given_up_is_dissolved_in_any_lease_state(harness, state):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    batch = harness.batch()
    if state == "lapsed":
        harness.advance(100.0)
    elif state == "released":
        harness.nack(batch)
    harness.core.dissolve("r", batch.id, "damaged", harness.now)
    harness.core.dissolve("r", batch.id, "damaged", harness.now)
    assert [event.reason for event in harness.settle()] == ["damaged"]
    with pytest.raises(BatchSuperseded):
        harness.ack(batch)
    harness.core.evict("r", batch.groups[0], harness.now)
    harness.settle()
    again = harness.batch()
    assert again.id != batch.id
    assert again.groups[0] == batch.groups[1]
    harness.ack(again)
    with pytest.raises(BatchAlreadyAcked):
        harness.core.dissolve("r", again.id, "damaged", harness.now)
    with pytest.raises(UnknownBatch):
        harness.core.dissolve("r", "none", "damaged", harness.now)


def test_a_nacked_batch_is_redelivered_whole(harness):
    harness.run(batch_size=2)
    harness.work()
    first = harness.batch()
    harness.nack(first)
    with pytest.raises(BatchSuperseded):
        harness.ack(first)
    again = harness.batch()
    assert (again.id, again.generation) == (first.id, 2)

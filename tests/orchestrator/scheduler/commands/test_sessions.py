"""Learner sessions and activity."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchSuperseded,
    SessionSuperseded,
)
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.scenarios import pull_all_shards


def test_a_learners_report_of_its_activity_renews_its_batch_leases(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch()
    for _ in range(3):
        harness.advance(60.0)
        request = messages.DoingRequest(learner="l", session="s", doing="training")
        harness.core.doing("r", request, harness.now)
    harness.advance(3.0)
    status = harness.status()
    assert (status.learner_doing, status.learner_doing_s, status.batches_open) == ("training", 3.0, 1)
    assert harness.events_of(events.BatchReleased) == []
    harness.ack(first)


def test_an_earlier_session_of_a_learner_is_refused_once_a_newer_one_took_its_place(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.batch("old")
    harness.batch("new")
    harness.restart(harness.restored(harness.core.snapshot()))
    with pytest.raises(SessionSuperseded, match="two learners run under one name"):
        harness.pull("old")
    with pytest.raises(SessionSuperseded):
        harness.resume("old")
    assert harness.settle() == []


def test_the_memory_of_learners_and_their_pulls_is_bounded(monkeypatch, harness):
    monkeypatch.setattr("headrace_orchestrator.scheduler.apply.batches.SHARDED_PULLS", 3)
    harness.run(batch_size=2)
    for number in range(6):
        harness.work()
        harness.ack(pull_all_shards(harness, f"pull-{number}", 2)[0])
    (sessions,) = harness.core.durable()["runs"]["r"]["sessions"].values()
    assert list(sessions[2]) == ["pull-3", "pull-4", "pull-5"]
    with pytest.raises(BatchSuperseded, match="was acked"):
        harness.pull(request="pull-5", shard=1, shards=2)


def report(harness, doing, **fields):
    request = messages.DoingRequest(learner="l", session="s", doing=doing, **fields)
    harness.core.doing("r", request, harness.now)


def test_a_learner_that_misses_its_heartbeats_is_silent_with_what_it_still_holds(harness):
    harness.run(batch_size=2, batch_lease_s=300)
    harness.work()
    harness.batch(heartbeat_s=10.0)
    for _ in range(6):
        harness.advance(10.0)
        report(harness, "training", heartbeat_s=10.0, renewal=True)
    status = harness.status()
    assert (status.learner_doing, status.learner_doing_s, status.learner_heard_s) == ("training", 60.0, 0.0)
    harness.advance(30.0)
    assert not harness.status().learner_silent
    harness.advance(1.0)
    status = harness.status()
    assert (status.learner_silent, status.learner_heard_s, status.learner_holds) == (True, 31.0, 1)
    report(harness, "training", heartbeat_s=10.0, renewal=True)
    assert not harness.status().learner_silent


def test_a_learner_without_heartbeats_is_silent_after_a_batch_lease(harness):
    harness.run(batch_size=2, batch_lease_s=50)
    harness.work()
    harness.ack(harness.batch())
    harness.advance(50.0)
    assert not harness.status().learner_silent
    harness.advance(1.0)
    assert harness.status().learner_silent


def test_a_learner_that_says_goodbye_is_gone_at_once_and_its_leases_are_not_renewed(harness):
    harness.run(batch_size=2, batch_lease_s=50)
    harness.work()
    harness.batch(heartbeat_s=10.0)
    harness.advance(40.0)
    report(harness, "gone")
    status = harness.status()
    assert (status.learner_doing, status.learner_waiting, status.learner_holds) == ("gone", False, 1)
    harness.advance(11.0)
    assert [event.reason for event in harness.events_of(events.BatchReleased)] == ["expired"]
    harness.batch("new")
    assert harness.status().learner_doing == "training"


def test_a_learner_that_acked_or_nacked_its_last_batch_does_not_train_any_more(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    first, second = harness.batch(), harness.batch()
    harness.ack(first)
    assert harness.status().learner_doing == "training"
    harness.nack(second)
    assert harness.status().learner_doing == "idle"
    report(harness, "checkpointing")
    harness.ack(harness.batch())
    assert harness.status().learner_doing == "idle"


def test_a_heartbeat_beside_a_waiting_pull_does_not_end_the_wait(harness):
    harness.run(batch_size=2)
    harness.empty(wait_s=20.0, heartbeat_s=10.0)
    harness.advance(10.0)
    report(harness, "idle", heartbeat_s=10.0, renewal=True)
    status = harness.status()
    assert (status.learner_doing, status.learner_waiting) == ("waiting", True)

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

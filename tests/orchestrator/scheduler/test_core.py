"""Commands, replay and stalls."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import version
from tests.orchestrator.scheduler.scenarios import busy_harness


def test_the_events_of_a_command_are_in_drain():
    harness = busy_harness()
    request = messages.VersionRequest(version="1.9")
    before = harness.core.durable()
    harness.core.announce("r", request, harness.now)
    assert harness.core.durable() != before
    decided = harness.core.drain()
    assert isinstance(decided[0], events.VersionAnnounced)
    assert {type(event).__name__ for event in decided} >= {"GroupRetired", "AttemptCancelled", "GroupAdmitted"}
    assert harness.core.drain() == []


def test_a_command_that_raises_has_changed_nothing():
    harness = busy_harness()
    core, now = harness.core, harness.now
    attempt = harness.lease(1, "other")[0]
    batch = next(event.batch for event in harness.events_of(events.BatchFormed))
    stranger = {"learner": "x", "session": "y", "generation": 1}
    groups = [messages.GroupRequest(task={"environment": "e"}), messages.GroupRequest(task={})]
    commands = [
        lambda: core.create_run(core.spec("r"), now),
        lambda: core.close_run("none", now),
        lambda: core.submit_groups("r", groups, now),
        lambda: core.start_evaluation("r", messages.EvaluationRequest(tasks=[]), now),
        lambda: core.pull("r", messages.PullRequest(learner="l", session="t", request="1", groups=["none"]), now),
        lambda: core.ack("r", batch, messages.AckRequest(**stranger), now),
        lambda: core.nack("r", batch, messages.NackRequest(**stranger, reason=""), now),
        lambda: core.announce("r", messages.VersionRequest(version="0.7"), now),
        lambda: core.rewind("r", messages.RewindRequest(version="5.5"), now),
        lambda: core.evict("r", "none", now),
        lambda: core.judge("other", attempt.nonce, harness.outcome(attempt, low=version("7.7")), now),
        lambda: core.judge("other", attempt.nonce, harness.outcome(attempt, low=version("0.9")), now),
    ]
    before = core.durable()
    for number, command in enumerate(commands):
        with pytest.raises(HeadraceError):
            command()
        assert core.drain() == []
        assert core.durable() == before, number


def test_replaying_all_events_gives_the_same_durable_state():
    harness = busy_harness()
    harness.now += 500.0
    core = harness.replayed()
    assert core.durable() == harness.core.durable()
    core.tick(harness.now)
    assert core.drain() == []
    for passed in (10.0, 20.0, 29.0):
        core.tick(harness.now + passed)
    assert core.drain() == [], "a full term"
    core.tick(harness.now + 30.0)
    assert core.drain()


def test_applying_the_events_of_a_log_in_order_restores_the_state_except_deadlines():
    harness = busy_harness()
    core = harness._scheduler()
    for position, event in enumerate(harness.log):
        core.apply(event, harness.now)
        if position % 5 == 0:
            assert harness.replayed(harness.log[: position + 1]).durable() == core.durable()


def test_a_tick_that_comes_late_expires_nothing(harness):
    harness.run(batch_size=2, attempt_lease_s=30, batch_lease_s=90, max_staleness=2)
    for attempt in harness.lease(2):
        harness.finish(attempt)
    batch = harness.batch()
    attempts = harness.lease(2)
    harness.advance(8.0)
    assert harness.stall(500.0) == []
    harness.heartbeat("another")
    harness.advance(29.0)
    assert harness.events_of(events.AttemptEnded) == []
    harness.advance(1.0)
    assert len(harness.events_of(events.AttemptEnded)) == len(attempts), "once"
    assert harness.events_of(events.BatchReleased) == []
    harness.advance(60.0)
    assert [event.batch for event in harness.events_of(events.BatchReleased)] == [batch.id]


def test_a_command_that_comes_first_after_a_stall_renews_all_the_same(harness):
    harness.run(attempt_lease_s=30)
    harness.lease(1)
    harness.now += 31.0
    harness.heartbeat("another")
    harness.advance(29.0)
    assert harness.events_of(events.AttemptEnded) == []

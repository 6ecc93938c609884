"""A run in an outage, or whose groups only go stale, is slowed down."""

from __future__ import annotations

import pytest

from headrace.trajectory import Version
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.admission import failure_backoff
from headrace_orchestrator.scheduler.state.admission.failure_streak import OUTAGE_FAILURES
from tests.orchestrator.scheduler.harness import BROKEN, NO_POLICY, Harness, codes

SLOTS = 32


@pytest.fixture
def harness() -> Harness:
    return Harness()


def fail_all(harness: Harness, seconds: float, failure=BROKEN) -> int:
    """Lease whenever an attempt may be due, and fail all; returns the number of granted attempts."""
    granted = 0
    end = harness.now + seconds
    while harness.now < end:
        attempts = harness.lease(SLOTS)
        granted += len(attempts)
        for attempt in attempts:
            harness.finish(attempt, "failed", failure=failure)
        harness.advance(0.05)
    return granted


def test_while_failures_look_like_an_outage_single_attempts_are_granted_at_growing_intervals(harness: Harness):
    harness.run(group_size=8, batch_size=16, short_groups="top_up", retries={"max_attempts": 100})
    at_full_speed = fail_all(harness, 0.05, NO_POLICY)
    assert at_full_speed == SLOTS
    first_second, first_minute = fail_all(harness, 1.0, NO_POLICY), fail_all(harness, 60.0, NO_POLICY)
    assert 0 < first_second <= 12
    assert 0 < first_minute < 60
    fail_all(harness, 60.0, NO_POLICY)
    assert fail_all(harness, 60.0, NO_POLICY) <= 60 / failure_backoff.LONGEST_S + 1


def test_in_an_outage_of_an_environment_each_try_goes_to_a_task_that_has_not_failed(harness: Harness):
    harness.run(group_size=8, batch_size=256, max_staleness=1, retries={"quarantine_after": 10_000})
    while not harness.core.state.runs["r"].has_outage:
        fail_all(harness, 0.01)
    assert harness.lease(SLOTS) == []
    failed = {event.task.seed for event in harness.events_of(events.EpisodeEnded)}
    assert len(failed) == OUTAGE_FAILURES
    for _ in range(20):
        harness.advance(failure_backoff.LONGEST_S)
        (single,) = harness.lease(SLOTS)
        assert single.task.seed not in failed
        failed.add(single.task.seed)
        harness.finish(single, "failed", failure=BROKEN)


def test_a_dropped_attempt_is_no_success_that_lifts_it(harness: Harness):
    harness.run(batch_size=64, attempt_lease_s=30, retries={"max_attempts": 100, "quarantine_after": 10_000})
    fail_all(harness, 5.0, NO_POLICY)
    harness.advance(failure_backoff.LONGEST_S)
    harness.lease(SLOTS)
    harness.heartbeat("w")
    harness.holding["w"] = {}
    for _ in range(3):
        harness.advance(10.0)
        harness.heartbeat("w")
    assert harness.events_of(events.AttemptEnded)[-1].reason == "dropped"
    assert len(harness.lease(SLOTS)) <= 1


def test_one_usable_record_after_failures_lifts_it_at_once(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    fail_all(harness, 5.0, NO_POLICY)
    harness.advance(failure_backoff.LONGEST_S)
    (single,) = harness.lease(SLOTS)
    assert harness.lease(SLOTS - 1) == []
    harness.finish(single)
    assert len(harness.lease(SLOTS)) == SLOTS


def test_attempts_at_workers_continue_where_groups_only_go_stale_the_next_try_waits_for_them(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    attempts = harness.lease(SLOTS)
    for attempt in attempts[:-1]:
        harness.finish(attempt, "failed", failure=NO_POLICY)
    assert harness.lease(SLOTS) == []
    harness.advance(failure_backoff.FIRST_S)
    assert len(harness.lease(SLOTS)) == 1, "an episode may take hours"
    assert harness.finish(attempts[-1]) == "accepted"
    harness = Harness()
    harness.run(batch_size=2, max_staleness=0)
    harness.announce("0.5")
    while not harness.core.state.runs["r"].makes_nothing_usable:
        for attempt in harness.lease(SLOTS):
            harness.finish(attempt, low=Version(0, 0))
    for expected in (0, 1, 0, 0):
        assert len(harness.lease(SLOTS)) == expected
        harness.advance(failure_backoff.FIRST_S)


def test_groups_that_only_go_stale_slow_it_down_and_one_within_bound_lifts_it(harness: Harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.announce("0.5")
    granted = 0
    for _ in range(200):
        for attempt in harness.lease(SLOTS):
            granted += 1
            harness.finish(attempt, low=Version(0, 0))
        harness.advance(0.05)
    assert granted < 60
    assert "policy-outdated" in codes(harness.empty())
    harness.advance(failure_backoff.LONGEST_S)
    (single,) = harness.lease(SLOTS)
    harness.finish(single, low=Version(0, 5))
    assert len(harness.lease(SLOTS)) > 0


def test_a_failing_environment_is_named_as_the_reason_with_the_time_of_the_next_try(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    fail_all(harness, 2.0)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "environment-failing"]
    assert "16 of the last 16 attempts failed there, the last with crashed" in reason.message
    assert "Retrying with single attempts; next in" in reason.message

"""A run that only fails, or only goes stale, is slowed down."""

from __future__ import annotations

import pytest

from headrace.trajectory import Version
from headrace_orchestrator.scheduler.state.admission import failure_backoff
from tests.orchestrator.scheduler.harness import BROKEN, NO_POLICY, Harness

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


def test_while_the_last_attempts_all_failed_one_at_a_time_is_granted_at_growing_intervals(harness: Harness):
    harness.run(batch_size=64, short_groups="top_up", retries={"max_attempts": 100, "quarantine_after": 10_000})
    at_full_speed = fail_all(harness, 0.05)
    assert at_full_speed == SLOTS
    first_second, tenth_minute = fail_all(harness, 1.0), fail_all(harness, 60.0)
    assert 0 < first_second < 10
    assert 0 < tenth_minute < 25
    assert fail_all(harness, 60.0) <= 60 / failure_backoff.LONGEST_S + 1


def test_one_usable_record_after_failures_lifts_it_at_once(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    fail_all(harness, 5.0, NO_POLICY)
    harness.advance(failure_backoff.LONGEST_S)
    (single,) = harness.lease(SLOTS)
    assert harness.lease(SLOTS - 1) == []
    harness.finish(single)
    assert len(harness.lease(SLOTS)) == SLOTS


def test_attempts_at_workers_continue(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    attempts = harness.lease(SLOTS)
    for attempt in attempts[:-1]:
        harness.finish(attempt, "failed", failure=BROKEN)
    assert harness.finish(attempts[-1]) == "accepted"


def test_groups_that_only_go_stale_slow_it_down_and_one_within_bound_lifts_it(harness: Harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.announce("0.5")
    granted = 0
    for _ in range(200):
        for attempt in harness.lease(SLOTS):
            granted += 1
            harness.finish(attempt, low=Version(0, 0))
        harness.advance(0.05)
    assert granted < 40
    assert "Does the policy server serve that version?" in str(harness.empty().reasons)
    harness.advance(failure_backoff.LONGEST_S)
    (single,) = harness.lease(SLOTS)
    harness.finish(single, low=Version(0, 5))
    assert len(harness.lease(SLOTS)) > 0


def test_a_failing_environment_is_named_as_the_reason_with_the_time_of_the_next_try(harness: Harness):
    harness.run(batch_size=64, retries={"max_attempts": 100, "quarantine_after": 10_000})
    fail_all(harness, 2.0)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "environment-failing"]
    assert "16 of the last 16 attempts failed there, the last with crashed" in reason.message
    assert "Retrying one attempt at a time; next in" in reason.message

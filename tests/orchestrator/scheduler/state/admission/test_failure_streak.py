"""Failures that look like an outage, and those that do not."""

from __future__ import annotations

from headrace_orchestrator.scheduler.state.admission.failure_streak import OUTAGE_FAILURES, FailureStreak


def streak_of(tasks: int, attempts_each: int = 1, causeless: int = 0) -> FailureStreak:
    streak = FailureStreak()
    for _ in range(attempts_each):
        for number in range(tasks):
            streak.add(b"%d" % number)
    for _ in range(causeless):
        streak.add(None)
    return streak


def test_failures_of_many_distinct_tasks_are_an_outage_those_of_a_few_are_the_fault_of_these_tasks():
    assert not streak_of(OUTAGE_FAILURES - 1, attempts_each=3).is_outage(8, 0)
    assert streak_of(OUTAGE_FAILURES).is_outage(8, 0)
    ended = streak_of(OUTAGE_FAILURES)
    ended.end()
    assert not ended.is_outage(8, 0)
    assert ended == FailureStreak()


def test_a_failure_that_no_task_causes_counts_each_time():
    assert not streak_of(0, causeless=OUTAGE_FAILURES - 1).is_outage(1, 1000)
    assert streak_of(0, causeless=OUTAGE_FAILURES).is_outage(1, 1000)
    assert streak_of(OUTAGE_FAILURES // 2, causeless=OUTAGE_FAILURES // 2).is_outage(8, 0)


def test_groups_at_workers_which_may_be_of_good_tasks_that_take_longer_count_against_an_outage():
    assert not streak_of(100).is_outage(8, 8 * 64)
    assert streak_of(128).is_outage(8, 8 * 64)
    assert streak_of(2000).is_outage(1, 1_000_000), "the memory of tasks is bounded"


def test_a_few_tasks_that_fail_without_end_are_an_outage_as_well():
    assert not streak_of(1, attempts_each=3 * 8 * 15).is_outage(8, 0)
    assert streak_of(1, attempts_each=3 * 8 * 16).is_outage(8, 0)

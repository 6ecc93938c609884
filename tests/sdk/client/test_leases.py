"""When held leases want to be renewed, on a clock that the test sets."""

from __future__ import annotations

import pytest

from headrace.client.leases import BatchLeases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> BatchLeases:
    return BatchLeases(clock)


def test_a_lease_is_renewed_at_a_third_of_its_term(leases: BatchLeases, clock: Clock) -> None:
    assert leases.next_due_s() is None
    leases.hold("guess", "b1", 300.0)
    assert leases.next_due_s() == 100.0
    assert leases.due() == []
    clock.now = 100.0
    assert leases.due() == ["guess"]
    leases.renewed("guess")
    assert (leases.due(), leases.next_due_s()) == ([], 100.0)


def test_a_step_of_twenty_minutes_is_renewed_all_along(leases: BatchLeases, clock: Clock) -> None:
    leases.hold("guess", "b1", 300.0)
    renewals = 0
    while clock.now < 1200.0:
        clock.now += leases.next_due_s() or 0.0
        for run in leases.due():
            leases.renewed(run)
            renewals += 1
    assert renewals == 12


def test_a_batch_that_was_acked_or_given_back_is_not_renewed(leases: BatchLeases) -> None:
    leases.hold("guess", "b1", 300.0)
    leases.drop("guess", "b1")
    leases.drop("guess", "b1")
    assert leases.next_due_s() is None


def test_the_shortest_term_of_all_runs_is_due_first(leases: BatchLeases, clock: Clock) -> None:
    leases.hold("guess", "b1", 300.0)
    leases.hold("other", "b2", 30.0)
    assert leases.next_due_s() == 10.0
    clock.now = 10.0
    assert leases.due() == ["other"]


def test_what_the_learner_said_last_is_repeated(leases: BatchLeases) -> None:
    leases.hold("guess", "b1", 300.0)
    leases.say("guess", "evaluating")
    leases.say("guess", "checkpointing")
    assert leases.doing("guess") == "checkpointing"


def test_a_learner_that_holds_a_batch_is_training_unless_it_says_more(leases: BatchLeases) -> None:
    assert leases.doing("guess") == "training"
    leases.say("guess", "waiting")
    assert leases.doing("guess") == "training"

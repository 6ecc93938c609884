"""Renewal times of held leases, with an injected clock."""

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
    leases.mark_renewed("guess")
    assert (leases.due(), leases.next_due_s()) == ([], 100.0)


def test_a_batch_is_renewed_throughout_a_step_of_twenty_minutes(leases: BatchLeases, clock: Clock) -> None:
    leases.hold("guess", "b1", 300.0)
    renewals = 0
    while clock.now < 1200.0:
        clock.now += leases.next_due_s() or 0.0
        for run in leases.due():
            leases.mark_renewed(run)
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


def test_a_renewal_reports_the_last_activity(leases: BatchLeases) -> None:
    leases.hold("guess", "b1", 300.0)
    leases.set_activity("guess", "evaluating")
    leases.set_activity("guess", "checkpointing")
    assert leases.activity("guess") == "checkpointing"


def test_a_learner_that_holds_a_batch_is_training_by_default(leases: BatchLeases) -> None:
    assert leases.activity("guess") == "training"
    leases.set_activity("guess", "waiting")
    assert leases.activity("guess") == "training"


def test_a_learner_reports_every_ten_seconds_from_its_first_pull_on(leases: BatchLeases, clock: Clock) -> None:
    leases.attend("guess")
    assert leases.attended() == ["guess"]
    assert (leases.due(), leases.next_due_s(), leases.activity("guess")) == ([], 10.0, "idle")
    clock.now = 10.0
    assert leases.due() == ["guess"]
    leases.hold("guess", "b1", 300.0)
    assert leases.activity("guess") == "training"
    leases.mark_renewed("guess")
    leases.attend("guess")
    assert (leases.due(), leases.next_due_s()) == ([], 10.0)
    leases.drop("guess", "b1")
    leases.set_activity("guess", "checkpointing")
    assert leases.activity("guess") == "checkpointing"
    leases.leave("guess")
    assert (leases.attended(), leases.next_due_s()) == ([], None)

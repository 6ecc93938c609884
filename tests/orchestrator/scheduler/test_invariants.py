"""Broken invariants are detected."""

from __future__ import annotations

import pytest

from tests.orchestrator.scheduler.harness import Harness
from tests.orchestrator.scheduler.invariants import check_invariants
from tests.orchestrator.scheduler.scenarios import busy_harness


def expect_violation(harness: Harness, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_invariants(harness.core.state)


def test_groups_in_flight_are_exactly_the_runs_own_groups_that_are_not_retired():
    harness = busy_harness()
    harness.core.state.runs["r"].ledger.in_flight += 1
    expect_violation(harness, "counts .* groups in flight; has .* open")


def test_each_groups_state_agrees_with_its_members_states():
    harness = busy_harness()
    run = harness.core.state.runs["r"]
    group = next(group for group in run.groups.values() if group.state == "open")
    group.state = "eligible"
    expect_violation(harness, "complete and open at once, or neither: group .* its history")


def test_between_commands_no_group_waits_for_a_decision_and_no_credit_lies_idle():
    harness = busy_harness()
    run = harness.core.state.runs["r"]
    assert (run.undecided, run.ledger.free) == ({}, 0)


def test_an_attempt_is_held_by_exactly_the_worker_that_it_was_granted_to():
    harness = busy_harness()
    workers = harness.core.state.workers
    thief = workers.named("thief", "default", harness.now)
    thief.attempts.update(workers.by_name["w"].attempts)
    expect_violation(harness, "is held by w and thief: episode .* its history")


def test_a_group_in_a_batch_is_in_exactly_one_and_is_leased():
    harness = busy_harness()
    run = harness.core.state.runs["r"]
    next(iter(run.batches.values())).groups.pop()
    expect_violation(harness, "is in no batch or several")


def test_bytes_held_and_episodes_reserved_are_those_of_the_groups_in_flight():
    harness = busy_harness()
    ledger = harness.core.state.runs["r"].ledger
    ledger.unfinished -= 1
    expect_violation(harness, "reserves for")
    ledger.unfinished += 1
    ledger.held_bytes += 1
    expect_violation(harness, "miscounts held bytes")


def test_every_index_agrees_with_the_episodes_and_groups():
    harness = busy_harness()
    run = harness.core.state.runs["r"]
    kept = run.queue.pop()
    expect_violation(harness, "it is queued in no queue")
    run.queue.append(kept)
    group = next(group for group in run.groups.values() if group.state == "eligible")
    run.eligible.remove(group)
    expect_violation(harness, "as eligible")
    run.eligible.add(group, run.versions)
    run.leased += 1
    expect_violation(harness, "miscounts leased")
    run.leased -= 1
    check_invariants(harness.core.state)

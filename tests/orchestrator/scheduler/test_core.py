"""Deciding and applying are apart; and ``check`` notices what it says it notices."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.queries.invariants import check_invariants
from tests.orchestrator.scheduler.harness import Harness, busy, version


def test_a_command_leaves_the_records_of_what_it_decided_in_drain():
    harness = busy()
    request = messages.VersionRequest(version="1.9")
    before = harness.core.durable()
    harness.core.announce("r", request, harness.now)
    assert harness.core.durable() != before
    decided = harness.core.drain()
    assert isinstance(decided[0], events.VersionAnnounced)
    assert {type(event).__name__ for event in decided} >= {"GroupRetired", "AttemptCancelled", "GroupAdmitted"}
    assert harness.core.drain() == []


def test_state_changes_only_by_applying_a_record():
    harness = busy()
    core = harness.replayed()
    before = core.durable()
    core.heartbeat(messages.HeartbeatRequest(worker="w", slots=8), harness.now)
    core.run_status("r", harness.now)
    core.worker_statuses(harness.now)
    core.doing("r", messages.DoingRequest(learner="l", session="s", doing="training"), harness.now)
    assert core.drain() == []
    assert core.durable() == before


def test_a_command_that_raises_has_changed_nothing():
    harness = busy()
    core, now = harness.core, harness.now
    attempt = harness.lease(1, "other")[0]
    batch = next(event.batch for event in harness.found(events.BatchFormed))
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


def test_replaying_all_records_gives_the_same_durable_state():
    harness = busy()
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


def test_applying_the_records_of_a_log_in_order_gives_the_state_back_but_for_deadlines():
    harness = busy()
    core = harness._scheduler()
    for position, event in enumerate(harness.log):
        core.apply(event, harness.now)
        if position % 5 == 0:
            assert harness.replayed(harness.log[: position + 1]).durable() == core.durable()


def test_between_commands_no_group_waits_for_a_decision_and_no_credit_lies_idle():
    harness = busy()
    run = harness.core.state.runs["r"]
    assert (run.undecided, run.ledger.free) == ({}, 0)


# What check notices -------------------------------------------------------------------------------------------


def notices(harness: Harness, history: str) -> None:
    with pytest.raises(AssertionError, match=history):
        check_invariants(harness.core.state)


def test_groups_in_flight_are_exactly_the_runs_own_groups_that_are_not_retired():
    harness = busy()
    harness.core.state.runs["r"].ledger.in_flight += 1
    notices(harness, "counts .* groups in flight; has .* open")


def test_each_groups_state_agrees_with_its_members_states():
    harness = busy()
    run = harness.core.state.runs["r"]
    group = next(group for group in run.groups.values() if group.state == "open")
    group.state = "eligible"
    notices(harness, "complete and open at once, or neither: group .* its history")


def test_an_attempt_is_held_by_exactly_the_worker_that_it_was_granted_to():
    harness = busy()
    workers = harness.core.state.workers
    thief = workers.named("thief", "default", harness.now)
    thief.attempts.update(workers.by_name["w"].attempts)
    notices(harness, "is held by w and thief: episode .* its history")


def test_a_group_in_a_batch_is_in_exactly_one_and_is_leased():
    harness = busy()
    run = harness.core.state.runs["r"]
    next(iter(run.batches.values())).groups.pop()
    notices(harness, "is in no batch or several")


def test_bytes_held_and_episodes_reserved_are_those_of_the_groups_in_flight():
    harness = busy()
    ledger = harness.core.state.runs["r"].ledger
    ledger.unfinished -= 1
    notices(harness, "reserves for")
    ledger.unfinished += 1
    ledger.held_bytes += 1
    notices(harness, "miscounts held bytes")


def test_every_index_says_what_the_episodes_and_groups_say():
    harness = busy()
    run = harness.core.state.runs["r"]
    kept = run.queue.pop()
    notices(harness, "it is queued in no queue")
    run.queue.append(kept)
    group = next(group for group in run.groups.values() if group.state == "eligible")
    run.eligible.remove(group)
    notices(harness, "as eligible")
    run.eligible.add(group, run.versions)
    run.leased += 1
    notices(harness, "miscounts leased")
    run.leased -= 1
    check_invariants(harness.core.state)

"""Reasons of empty answers."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import (
    Conflict,
)
from tests.orchestrator.scheduler.harness import NO_POLICY, codes


def test_a_failing_policy_is_a_reason(harness):
    harness.run(group_size=2, batch_size=2)
    for attempt in harness.lease(4):
        harness.finish(attempt, "failed", failure=NO_POLICY)
    reply = harness.empty()
    assert "policy-failing" in codes(reply)
    message = next(reason.message for reason in reply.reasons if reason.code == "policy-failing")
    assert "4 of the last 4 attempts failed there, the last with unreachable: Connection refused." in message


def test_a_reason_shows_the_first_part_of_a_long_message_on_one_line(harness):
    harness.run(group_size=2, batch_size=2)
    for attempt in harness.lease(4):
        harness.finish(attempt, "failed", failure=msgspec.structs.replace(NO_POLICY, message="line\n" * 5000))
    message = next(reason.message for reason in harness.empty().reasons if reason.code == "policy-failing")
    assert "line line" in message
    assert "\n" not in message
    assert len(message) < 600


def test_an_empty_answer_always_has_a_reason(harness):
    harness.run(batch_size=6, pool="x")
    reply = harness.empty()
    assert codes(reply) == ["no-workers", "collecting"]
    assert reply.reasons[0].message == "no workers in pool 'x': 12 episodes queued"
    assert reply.reasons[0].facts == {"pool": "x", "queued": 12, "workers": 0}
    harness.lease(2, pool="x")
    reply = harness.empty()
    assert codes(reply) == ["collecting"]
    assert reply.reasons[0].message == "0 of 6 groups ready; 2 episodes at workers, 10 queued."
    assert not reply.finished


def test_workers_without_the_capabilities_do_not_count(harness):
    harness.run(batch_size=1, capabilities=["reasoning-gym"])
    harness.lease(2)
    expected = "no workers in pool 'default' that offer ['reasoning-gym']: 2 episodes queued"
    assert harness.empty().reasons[0].message == expected


def test_draining_workers_are_named(harness):
    harness.run(batch_size=1)
    harness.lease(1)
    harness.core.drain_worker("w", harness.now)
    harness.settle()
    assert "all 1 worker in pool 'default' drain" in harness.empty().reasons[0].message


def test_workers_that_an_environment_ends_are_counted_with_its_name(harness):
    harness.run(group_size=4, batch_size=4, environments=[{"id": "game:Exits"}])
    for number in (1, 2, 3):
        harness.holding["w0"] = {}
        harness.lease(4, "w0", instance=f"process{number}")
        assert ("workers-lost" in codes(harness.empty())) == (number > 2), "one restart is usual"
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "workers-lost"]
    assert reason.message.startswith("In the last 5 minutes 2 workers were lost, with 8 attempts of game:Exits.")
    assert "more than 30 workers" in reason.message
    harness.advance(301.0)
    assert "workers-lost" not in codes(harness.empty())


def test_holding_k_batches_needs_max_staleness_of_at_least_k_minus_1_and_the_reason_says_so(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.batch()
    harness.batch()
    reply = harness.empty()
    assert "batches-held" in codes(reply)
    assert reply.reasons[0].message == ("2 batches held unacked. To hold 3, max_staleness must be at least 2; it is 1.")


def test_more_ready_groups_than_a_batch_needs_are_counted_as_they_are(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    said = harness.status().reasons[-1].message
    assert said == "4 groups ready, a batch needs 2; 0 episodes at workers, 0 queued."


def test_the_reason_of_a_held_batch_that_staleness_allows_asks_for_no_more_of_it(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.batch()
    said = next(reason.message for reason in harness.status().reasons if reason.code == "batches-held")
    assert said.startswith("1 batch held unacked. Nothing more is admitted")


def test_stale_groups_are_named_as_the_reason(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.announce("0.2")
    reply = harness.empty()
    assert "all-stale" in codes(reply)
    message = next(reason.message for reason in reply.reasons if reason.code == "all-stale")
    assert message == "4 groups went stale since the last batch: more than 1 version behind 0.2."


def test_a_run_without_submitted_groups_is_a_reason(harness):
    harness.run(source="learner")
    assert codes(harness.empty()) == ["no-tasks"]


def test_a_closed_run_is_finished_for_good(harness):
    harness.run(group_size=2, batch_size=2)
    attempts = harness.lease(3)
    for attempt in attempts[:2]:
        harness.finish(attempt)
    held = harness.batch()
    harness.core.close_run("r", harness.now)
    harness.core.close_run("r", harness.now)
    harness.settle()
    reply = harness.empty()
    assert (codes(reply), reply.finished) == (["closed"], True)
    assert harness.status().state == "closed"
    assert held.groups
    assert [c.record for c in harness.heartbeat().cancels] == [True]
    assert harness.finish(attempts[2], "cancelled") == "accepted"
    assert harness.lease(4) == []
    with pytest.raises(Conflict):
        harness.submit("g")
    with pytest.raises(Conflict):
        harness.evaluate()


def test_a_running_evaluation_is_named_as_a_reason(harness):
    harness.run(batch_size=4)
    harness.evaluate(1, deadline_s=90.0)
    harness.lease(2)
    message = next(reason.message for reason in harness.empty().reasons if reason.code == "evaluation-hold")
    assert message.endswith("1 of 1 episodes are not over; it ends in 90 s at the latest.")

"""Episodes that end without a failure and have nothing to train on."""

from __future__ import annotations

from typing import Any

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.run import MIN_UNUSABLE
from tests.orchestrator.scheduler.harness import Harness, codes


def finish_rowless(harness: Harness, attempt: messages.Assignment, **fields: Any) -> None:
    """Submit a record of an episode whose first prompt left no room for a turn."""
    fields = {"rewards": {}, "low": None, "row_tokens": 0, **fields}
    assert harness.finish(attempt, "truncated", **fields) == "accepted"


def test_an_episode_without_a_row_does_not_count_for_the_size_of_a_batch(harness):
    harness.run(batch_size=4, max_staleness=1)
    attempts = harness.lease(8)
    for attempt in attempts[:4]:
        finish_rowless(harness, attempt)
    for attempt in attempts[4:7]:
        harness.finish(attempt)
    assert "no-rows" in codes(harness.empty())
    harness.finish(attempts[7])
    assert harness.batch().groups == [attempt.group for attempt in attempts[4:]]


def test_a_group_without_a_row_is_retired_and_its_credit_returned(harness):
    harness.run(batch_size=2, group_size=2, max_staleness=0)
    first, second = harness.lease(2)
    finish_rowless(harness, first)
    finish_rowless(harness, second)
    assert harness.retired() == {first.group: "no-rows"}
    assert harness.events_of(events.MemberAdded) == [], "another member would have no row either"
    status = harness.status()
    assert (status.in_flight, status.queued, status.rowless) == (1, 2, 2)
    assert status.episodes == {"truncated": 2}


def test_a_member_without_a_row_is_replaced_once_another_has_one(harness):
    harness.run(batch_size=3, group_size=3, max_staleness=0)
    first, second, third = harness.lease(3)
    finish_rowless(harness, first, turns=2)
    assert harness.events_of(events.MemberAdded) == []
    harness.finish(second)
    assert len(harness.events_of(events.MemberAdded)) == 1
    harness.finish(third)
    (added,) = harness.lease(1)
    harness.finish(added)
    batch = harness.batch()
    assert batch.groups == [first.group]
    assert harness.status().selected.get("short") is None


def test_a_group_that_is_served_as_it_is_holds_only_trajectories_with_rows(harness):
    harness.run(batch_size=2, group_size=2, max_staleness=0, short_groups="serve", zero_variance="keep")
    first, second = harness.lease(2)
    finish_rowless(harness, first)
    harness.finish(second)
    harness.batch()  # the harness compares its trajectories with the events
    assert harness.status().selected == {"fifo": 1, "short": 1}


def test_the_reason_counts_episodes_without_a_row_by_cause(harness):
    harness.run(batch_size=8, limits={"max_context_tokens": 64})
    attempts = harness.lease(8)
    for attempt in attempts[:3]:
        finish_rowless(harness, attempt)
    finish_rowless(harness, attempts[3], turns=2)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "no-rows"]
    assert reason.message == (
        "Since the last batch 4 episodes had nothing to train on: in 1 no agent that is trained had a turn, and in 3 "
        "the first prompt is longer than the context (max_context_tokens is 64)."
    )
    assert reason.facts == {"episodes": 4, "prompt-too-long": 3, "not-trained": 1}


def test_a_list_without_any_row_ends_with_the_reason(harness):
    harness.run(tasks=[{"environment": "game:A"}], batch_size=1)
    (attempt,) = harness.lease(4)
    finish_rowless(harness, attempt)
    reply = harness.empty()
    assert reply.finished
    assert codes(reply) == ["tasks-exhausted", "no-rows"]


def test_a_run_that_makes_nothing_to_train_on_is_slowed_down_until_one_episode_has_a_row(harness):
    harness.run(batch_size=64, max_staleness=1)
    for _ in range(MIN_UNUSABLE // 64 + 1):
        for attempt in harness.lease(64):
            finish_rowless(harness, attempt)
    assert harness.lease(64) == []
    harness.advance(0.2)
    (probe,) = harness.lease(64)
    harness.finish(probe)
    assert len(harness.lease(64)) == 64


def test_a_restart_counts_episodes_without_a_row_as_before(harness):
    harness.run(batch_size=4, group_size=2)
    first, second, third = harness.lease(3)
    for attempt in (first, second, third):
        finish_rowless(harness, attempt)
    harness.restart()
    harness.restart(harness.restored(harness.core.snapshot()))
    assert harness.status().rowless == 3
    assert "no-rows" in codes(harness.empty())

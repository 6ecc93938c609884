"""The group that a batch waits for rather than let it go stale."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.selection import SELECTION_RULES, SelectionRule
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import FLAKY, Harness, ServedBatch, codes

LOW = {"low": Version(0, 0)}


def slow_first(harness: Harness, **spec: Any) -> messages.Assignment:
    """A run of which all dispatched groups are complete, except the one that began first."""
    harness.run(**{"batch_size": 2, "max_staleness": 0, **spec})
    slow, *others = harness.lease(64)
    for attempt in others:
        harness.finish(attempt)
    return slow


def with_a_slow_group(harness: Harness, **spec: Any) -> messages.Assignment:
    """A run with a ready group, and an older open one that would go stale at the next version."""
    harness.run(batch_size=1, max_staleness=1, **spec)
    slow, other = harness.lease(2)
    harness.finish(other)
    harness.ack(harness.batch(), "0.1")
    (ready,) = harness.lease(1)
    harness.finish(ready)
    return slow


def oldest_group(reply: messages.EmptyReply) -> messages.Reason:
    return next(reason for reason in reply.reasons if reason.code == "oldest-group")


def test_a_batch_waits_for_an_older_group_that_would_go_stale_and_takes_it_first(harness: Harness):
    harness.run(environments=[{"id": "game:Slow"}], batch_size=2, max_staleness=1)
    slow, *others = harness.lease(64)
    for attempt in others:
        harness.finish(attempt)
    first = harness.batch()
    assert slow.group not in first.groups, "it can be served in the next one"
    harness.ack(first, "0.1")
    harness.work()
    harness.advance(12.0)
    reason = oldest_group(harness.empty(wait_s=10))
    assert reason.message == (
        f"3 groups ready. The next batch waits for group {slow.group} (task 0 of game:Slow), which would go stale "
        "otherwise: it began 12.0 s ago, and has 1 episode at workers, 0 queued."
    )
    assert (reason.facts["group"], reason.facts["task"], reason.facts["running_s"]) == (slow.group, "0", 12.0)
    harness.finish(slow, **LOW)
    assert harness.batch().groups[0] == slow.group


def test_a_batch_that_older_complete_groups_fill_does_not_wait(harness: Harness):
    harness.run(batch_size=2, max_staleness=1)
    *others, slow = harness.lease(64)
    for attempt in others:
        harness.finish(attempt)
    assert harness.batch().groups == [attempt.group for attempt in others[:2]]
    assert codes(harness.empty())[-1] == "collecting"
    harness.finish(slow)
    assert harness.batch().groups == [others[2].group, slow.group]


def test_a_group_is_passed_over_only_as_long_as_the_batches_that_are_held_leave_it_time(harness: Harness):
    slow = slow_first(harness, batch_size=1, max_staleness=3)
    served = [harness.batch(f"s{number}", learner=f"l{number}") for number in range(3)]
    assert all(slow.group not in batch.groups for batch in served)
    assert harness.status().batches_open == 3, "with the third acked it would be three behind"
    harness.finish(slow)
    assert harness.batch("s3", learner="l3").groups == [slow.group]


@pytest.mark.parametrize("end", ["failed", "truncated", "quarantined", "evicted"])
def test_a_group_that_is_over_in_any_way_releases_the_wait(harness: Harness, end: str):
    quarantine_after = 1 if end == "quarantined" else 99
    slow = with_a_slow_group(harness, short_groups="serve", retries={"quarantine_after": quarantine_after})
    assert oldest_group(harness.empty()).facts["group"] == slow.group
    if end == "evicted":
        harness.core.evict("r", slow.group, harness.now)
        harness.settle()
    else:
        harness.finish(slow, "truncated" if end == "truncated" else "failed", **LOW if end == "truncated" else {})
    assert (slow.group in harness.batch().groups) == (end == "truncated")


def test_the_cut_of_a_late_group_bounds_the_wait(harness: Harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0, partial_after_s=20.0)
    first, late, *others = harness.lease(64)
    for attempt in [first, *others]:
        harness.finish(attempt)
    assert codes(harness.empty()) == ["collecting"]
    harness.advance(21.0)
    assert harness.finish(late, "cancelled") == "accepted"
    assert harness.batch().groups == [first.group, others[0].group]


def test_the_reason_names_a_worker_that_fell_silent_and_the_end_of_its_lease_moves_the_group_to_another(
    harness: Harness,
):
    harness.run(batch_size=1, max_staleness=1, attempt_lease_s=30)
    (slow,) = harness.lease(1, "dead")
    (other,) = harness.lease(1, "live")
    harness.finish(other, worker="live")
    harness.ack(harness.batch(), "0.1")
    (third,) = harness.lease(1, "live")
    harness.finish(third, worker="live")
    harness.advance(20.0)
    assert "No message came from dead (20 s)" in oldest_group(harness.empty()).message
    harness.advance(11.0)
    assert isinstance(harness.pull(), ServedBatch), "it has no row, so it begins anew with the current version"
    assert [attempt.group for attempt in harness.lease(1, "live")] == [slow.group]


def test_without_workers_the_pull_says_so(harness: Harness):
    harness.run(group_size=2, batch_size=2, max_staleness=1)
    first, late = harness.lease(2, "dead")
    harness.finish(first, worker="dead")
    for attempt in harness.lease(2, "live"):
        harness.finish(attempt, worker="live")
    harness.ack(harness.batch(), "0.1")
    for attempt in harness.lease(2, "live"):
        harness.finish(attempt, worker="live")
    harness.advance(200.0)
    assert late.group == first.group
    assert {"oldest-group", "no-workers"} <= set(codes(harness.empty()))


def test_a_filtered_pull_waits_for_its_own_kind_only(harness: Harness):
    harness.run(
        tasks=[{"environment": f"game:{kind}", "seed": n} for n, kind in enumerate("ABABBA")],
        batch_size=1,
        max_staleness=1,
    )
    a, b = harness.lease(2)
    harness.finish(b)
    harness.ack(harness.batch(environments=["game:B"]), "0.1")
    for attempt in harness.lease(1):
        harness.finish(attempt)
    assert a.task.environment == "game:A"
    assert "oldest-group" in codes(harness.empty(environments=["game:A"]))
    assert "oldest-group" not in codes(harness.empty(environments=["game:B"]))


def test_a_pull_that_names_groups_waits_for_no_other(harness: Harness):
    harness.run(source="learner", batch_size=1, max_staleness=0)
    ids = harness.submit("old", "new")
    _, new = harness.lease(2)
    harness.finish(new)
    assert harness.batch(groups=[ids[1]]).groups == [ids[1]]


def test_a_rule_of_another_package_may_wait_as_well(monkeypatch: pytest.MonkeyPatch):
    harness = Harness()
    drawn = SelectionRule(lambda groups: groups.drawn(), waits=True)
    monkeypatch.setitem(SELECTION_RULES, "drawn", drawn)
    slow = with_a_slow_group(harness, selection={"order": "drawn"})
    assert oldest_group(harness.empty()).facts["group"] == slow.group


def test_a_batch_that_was_pulled_by_name_counts_as_one_that_may_make_a_version(harness: Harness):
    harness.run(batch_size=1, max_staleness=1)
    slow, other = harness.lease(2)
    (named,) = harness.submit("named")
    harness.finish(harness.lease(1)[0])
    harness.finish(other)
    held = harness.batch(groups=[named])
    assert oldest_group(harness.empty("s2", learner="l2")).facts["group"] == slow.group
    harness.ack(held)
    assert harness.batch("s2", learner="l2").groups == [other.group]


def test_evaluations_are_not_waited_for(harness: Harness):
    harness.run(batch_size=1, max_staleness=0)
    harness.evaluate(1)
    attempts = harness.lease(8, slots=64)
    for attempt in attempts:
        if not attempt.evaluation:
            harness.finish(attempt)
    assert isinstance(harness.pull(), ServedBatch)


def test_a_budget_of_tokens_waits_for_the_group_before_the_one_that_would_fill_it(harness: Harness):
    harness.run(batch_size=1, batch_tokens=200, max_staleness=1)
    first = harness.lease(1)[0]
    harness.finish(first)
    slow, *others = [attempt for _ in range(4) for attempt in harness.lease(1)]
    for attempt in others:
        harness.finish(attempt)
    harness.ack(harness.batch(), "0.1")
    harness.work()
    assert "oldest-group" in codes(harness.empty())
    harness.finish(slow, **LOW)
    assert slow.group in harness.batch().groups


def test_with_several_uses_no_group_is_passed_over(harness: Harness):
    slow = slow_first(harness, batch_size=1, max_staleness=3, max_uses=2)
    assert oldest_group(harness.empty()).facts["group"] == slow.group
    harness.finish(slow)
    assert harness.batch().groups == [slow.group]


@pytest.mark.parametrize("zero_variance", ["drop", "replace"])
def test_groups_without_a_spread_that_are_dropped_or_replaced_release_the_wait(harness: Harness, zero_variance: str):
    harness.run(group_size=2, batch_size=4, max_staleness=0, zero_variance=zero_variance)
    *others, slow = harness.lease(64)
    for number, attempt in enumerate(others):
        harness.finish(attempt, rewards={"agent": float(number)})
    assert isinstance(harness.pull(), messages.EmptyReply)
    harness.finish(slow, rewards={"agent": float(len(others) - 1)})
    for number, attempt in enumerate(harness.lease(64)):
        harness.finish(attempt, rewards={"agent": float(number)})
    assert isinstance(harness.pull(), ServedBatch)


@pytest.mark.parametrize("how", ["replay", "snapshot"])
def test_a_restarted_service_waits_for_the_same_group(harness: Harness, how: str):
    slow = with_a_slow_group(harness)
    harness.empty()
    harness.restart(harness.replayed() if how == "replay" else harness.restored(harness.core.snapshot()))
    assert oldest_group(harness.empty()).facts["group"] == slow.group
    harness.finish(slow, **LOW)
    assert harness.batch().groups == [slow.group]


@pytest.mark.parametrize("order", ["ready", "lifo", "uniform", "prioritized"])
def test_the_other_orders_wait_for_no_group(harness: Harness, order: str):
    slow = with_a_slow_group(harness, selection={"order": order})
    assert slow.group not in harness.batch().groups


def test_the_task_of_a_list_whose_group_went_stale_is_drawn_again_unless_it_failed(harness: Harness):
    tasks = [{"environment": "game:A", "seed": seed} for seed in range(2)]
    harness.run(tasks=tasks, batch_size=1, max_staleness=0, retries={"max_attempts": 1})
    stale = harness.lease(1)[0]
    harness.announce("0.1")
    assert harness.retired() == {stale.group: "stale"}
    harness.finish(stale, "cancelled")
    again = harness.lease(1)[0]
    assert (again.task, again.group != stale.group) == (stale.task, True)
    harness.restart()
    harness.finish(again, "failed", failure=FLAKY)
    harness.work()
    served = harness.batch()
    harness.ack(served, "0.2")
    harness.work()
    admitted = [event.position for event in harness.events_of(events.GroupAdmitted)]
    assert sorted(admitted) == [0, 0, 1], "a task that failed is not drawn again"

"""Pulls: redelivery, plans, formed batches."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchSuperseded,
    Conflict,
    UnknownGroup,
)
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands.pull_plan import Form
from tests.orchestrator.scheduler.harness import codes
from tests.orchestrator.scheduler.scenarios import kinds_of_batch, mixed_harness


def test_a_pull_that_names_groups_is_served_exactly_these_once_complete(harness):
    harness.run(source="learner", group_size=2, batch_size=8)
    harness.submit("a", "b", "c")
    assert codes(harness.empty(groups=["c", "a"])) == ["no-workers", "collecting"]
    harness.work()
    assert harness.batch(groups=["c", "a"]).groups == ["c", "a"]
    assert harness.batch(groups=["b"]).groups == ["b"]
    reply = harness.empty(groups=["a"])
    assert reply.reasons[0].code == "batches-held"


def test_awaited_groups_do_not_stay_in_a_batch_that_no_learner_pulls(harness):
    harness.run(source="learner", batch_size=2)
    harness.submit("a", "b")
    harness.work()
    harness.nack(harness.batch())
    assert harness.batch(groups=["a"]).groups == ["a"]
    assert harness.batch(groups=["b"]).groups == ["b"]


def test_only_whole_groups_are_served_oldest_dispatch_first(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=1)
    attempts = harness.lease(8)
    groups = list(dict.fromkeys(a.group for a in attempts))
    for attempt in reversed(attempts[2:]):
        harness.finish(attempt)
    # The oldest group is not complete; it does not block the later ones.
    assert harness.batch().groups == groups[1:3]
    for attempt in attempts[:2]:
        harness.finish(attempt)
    assert harness.batch().groups == [groups[0], groups[3]]


def test_a_plan_lists_the_stored_trajectories_without_failed_ones(harness):
    harness.run(group_size=3, batch_size=3, short_groups="serve")
    attempts = harness.lease(3)
    harness.finish(attempts[2])
    harness.finish(attempts[1], "failed")
    harness.finish(attempts[0], "truncated")
    plan = harness.core.pull("r", messages.PullRequest(learner="l", session="s", request="1"), harness.now)
    assert isinstance(plan, Form)
    expected = [f"trajectory of {attempts[0].episode}", f"trajectory of {attempts[2].episode}"]
    assert plan.groups == [(attempts[0].group, expected)]
    assert harness.settle() == [], "planning changes nothing"
    request = messages.PullRequest(learner="l", session="s", request="1")
    harness.core.form("r", plan, request, harness.now)
    harness.settle()
    with pytest.raises(Conflict):
        harness.core.form("r", plan, request, harness.now)


def test_the_same_request_of_a_session_is_answered_with_the_same_batch(harness):
    harness.run(batch_size=2)
    harness.work()
    first = harness.batch(request="1")
    again = harness.batch(request="1")
    assert (again.id, again.generation) == (first.id, 1)
    other = harness.batch(request="2")
    assert other.id != first.id
    harness.ack(first)
    harness.work()
    assert harness.batch(request="1").id not in (first.id, other.id)


def test_batches_that_another_session_of_the_learner_left_open_are_released_and_served_first(harness):
    harness.run(batch_size=2)
    harness.work()
    first, second = harness.batch("old"), harness.batch("old")
    again = harness.batch("new")
    assert (again.id, again.generation) == (first.id, 2)
    assert harness.batch("new").id == second.id
    with pytest.raises(BatchSuperseded, match="generation 2"):
        harness.ack(first)
    harness.ack(again)


def test_another_learner_gets_batches_of_its_own(harness):
    harness.run(batch_size=2)
    harness.work()
    first, second = harness.batch("s", learner="a"), harness.batch("t", learner="b")
    assert first.id != second.id
    harness.ack(first)
    harness.ack(second)


def test_a_batch_whose_lease_ran_out_is_redelivered_whole_while_within_bound(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch("a", learner="x")
    harness.advance(100.0)
    again = harness.batch("b", learner="y")
    assert (again.id, again.groups, again.generation) == (first.id, first.groups, 2)
    with pytest.raises(BatchSuperseded):
        harness.ack(first)
    harness.ack(again)


def test_a_batch_whose_lease_ran_out_is_dissolved_when_it_is_out_of_bound(harness):
    harness.run(batch_size=2, batch_lease_s=100, max_staleness=0)
    harness.work()
    first = harness.batch()
    harness.announce("0.1")
    assert harness.events_of(events.BatchDissolved) == [], "its lease lives"
    harness.advance(100.0)
    assert [r.reason for r in harness.events_of(events.BatchDissolved)] == ["stale"]
    assert harness.retired() == dict.fromkeys(first.groups, "stale")
    with pytest.raises(BatchSuperseded, match="dissolved"):
        harness.ack(first)


def test_a_closed_run_redelivers_nothing(harness):
    harness.run(batch_size=2)
    harness.work()
    held = harness.batch("old")
    harness.core.close_run("r", harness.now)
    harness.settle()
    assert harness.empty("new").finished
    with pytest.raises(BatchSuperseded):
        harness.ack(held)


def test_a_learner_that_got_nothing_counts_as_waiting_for_as_long_as_it_asked_to_wait(harness):
    harness.run()
    harness.empty(wait_s=20.0)
    assert harness.status().learner_waiting
    harness.advance(21.0)
    assert not harness.status().learner_waiting


def test_a_group_is_served_max_uses_times_and_holds_its_credit_until_then(harness):
    harness.run(batch_size=2, max_uses=3, max_staleness=0)
    harness.work()
    seen = []
    for uses in range(3):
        assert harness.status().in_flight == 2
        batch = harness.batch()
        seen.append(batch.groups)
        assert harness.retired() == {}, uses
        harness.ack(batch)
    assert seen[0] == seen[1] == seen[2]
    assert harness.retired() == dict.fromkeys(seen[0], "acked")


def test_evicted_groups_are_not_planned_again(harness):
    harness.run(batch_size=1)
    harness.work()
    plan = harness.core.pull("r", messages.PullRequest(learner="l", session="s", request="1"), harness.now)
    assert isinstance(plan, Form)
    (group, _), *_ = plan.groups
    harness.core.evict("r", group, harness.now)
    harness.settle()
    assert harness.retired() == {group: "evicted"}
    held = harness.batch()
    assert held.groups != [group]
    with pytest.raises(Conflict):
        harness.core.evict("r", held.groups[0], harness.now)
    with pytest.raises(UnknownGroup):
        harness.core.evict("r", group, harness.now)


def test_the_tail_of_a_list_waits_for_groups_that_have_uses_left(harness):
    harness.run(tasks=[{"environment": "game:A", "seed": seed} for seed in range(3)], batch_size=2, max_uses=2)
    harness.work()
    first = harness.batch()
    assert not harness.empty().finished, "alone, the third would make a smaller batch than it has to"
    harness.ack(first)
    assert len(harness.batch().groups) == 2


def shrink_groups(harness):
    """Make a run of large groups and then a small one, whose credit is too little for a batch."""
    harness.run(batch_size=1, batch_tokens=900, max_staleness=0)
    for _ in range(40):
        harness.finish(harness.lease(1)[0], row_tokens=1000)
        harness.ack(harness.batch())
    harness.finish(harness.lease(1)[0], row_tokens=100)
    assert harness.status().in_flight == 1


def test_a_pull_on_an_idle_run_admits_one_more_group(harness):
    shrink_groups(harness)
    for _ in range(2):
        assert not harness.empty().finished
        assert harness.status().in_flight == 2, "only one: then it is not idle"
    harness.finish(harness.lease(1)[0], row_tokens=800)
    assert len(harness.batch().groups) == 2


def test_a_held_batch_blocks_the_one_more_group(harness):
    harness.run(batch_size=1, batch_tokens=1000, max_staleness=0)
    harness.finish(harness.lease(1)[0], row_tokens=1000)
    harness.batch()
    in_flight = harness.status().in_flight
    assert "batches-held" in codes(harness.empty())
    assert harness.status().in_flight == in_flight


def test_the_byte_bound_blocks_the_one_more_group(harness):
    harness.run(batch_size=4, max_staleness=0, max_bytes=10_000)
    while attempts := harness.lease(4):
        for attempt in attempts:
            harness.finish(attempt, size_bytes=6000)
    in_flight = harness.status().in_flight
    assert codes(harness.empty()) == ["byte-bound"]
    assert harness.status().in_flight == in_flight == 3


def test_a_batch_is_redelivered_only_to_a_pull_whose_filter_or_groups_it_fits():
    harness = mixed_harness()
    anything, hard = harness.batch(), harness.batch(environments=["game:B"])
    assert len(kinds_of_batch(harness, anything)) > 1
    harness.nack(anything)
    harness.nack(hard)
    assert harness.batch(environments=["game:B"], request="1").id == hard.id
    other = harness.batch(tags=["easy"])
    assert other.id not in (anything.id, hard.id)
    harness.nack(harness.batch(environments=["game:B"], request="1"))
    assert harness.batch(environments=["game:A", "game:B"]).id == anything.id
    assert harness.batch().id == hard.id, "a pull that asks for nothing takes any"

"""Serving: pull, form, ack, nack, redelivery."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    Conflict,
    UnknownBatch,
    UnknownGroup,
    VersionConflict,
)
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands.pull_plan import Form
from tests.orchestrator.scheduler.harness import version


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
    assert harness.found(events.BatchDissolved) == [], "its lease lives"
    harness.advance(100.0)
    assert [r.reason for r in harness.found(events.BatchDissolved)] == ["stale"]
    assert harness.retired() == dict.fromkeys(first.groups, "stale")
    with pytest.raises(BatchSuperseded, match="dissolved"):
        harness.ack(first)


def test_a_leased_batch_that_went_stale_meanwhile_may_still_be_acked(harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.work()
    first = harness.batch()
    harness.announce("0.3")
    assert harness.ack(first, "0.4").version == "0.4"
    assert harness.retired() == dict.fromkeys(first.groups, "acked")


def test_until_it_is_redelivered_its_holder_may_ack_a_batch_whose_lease_ran_out(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch()
    harness.advance(150.0)
    harness.announce("0.1")
    harness.announce("0.2")
    assert harness.ack(first).batch == first.id
    with pytest.raises(BatchAlreadyAcked):
        harness.nack(first)


def test_a_repeated_ack_of_the_same_session_and_generation_gets_the_same_answer(harness):
    harness.run(batch_size=2)
    harness.work()
    first = harness.batch()
    reply = harness.ack(first, "0.1")
    harness.announce("0.2")
    before = harness.core.durable()
    assert harness.ack(first, "0.1") == reply
    assert harness.core.durable() == before
    first.session = "another"
    with pytest.raises(BatchAlreadyAcked, match="session 's' in generation 1"):
        harness.ack(first, "0.1")
    first.id = "nothing"
    with pytest.raises(UnknownBatch):
        harness.ack(first)


def test_an_ack_carries_the_version_that_the_step_made_in_the_same_record(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.ack(harness.batch(), "0.1")
    (acked,) = harness.found(events.BatchAcked)
    assert acked.version == version("0.1")
    assert harness.found(events.VersionAnnounced) == []
    assert harness.status().version == "0.1"


def test_an_ack_with_a_version_out_of_order_is_refused_and_changes_nothing(harness):
    harness.run(batch_size=2)
    harness.announce("0.5")
    harness.work()
    first = harness.batch()
    before = harness.core.durable()
    with pytest.raises(VersionConflict):
        harness.ack(first, "0.4")
    assert harness.core.durable() == before
    harness.ack(first, "0.5")


def test_an_ack_of_an_older_generation_is_always_superseded(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch(request="1")
    harness.advance(100.0)
    again = harness.batch(request="1")
    assert (again.id, again.generation) == (first.id, 2)
    with pytest.raises(BatchSuperseded):
        harness.ack(first, "0.1")
    harness.ack(again, "0.1")
    with pytest.raises(BatchSuperseded, match="acked in generation 2; this was generation 1"):
        harness.ack(first, "0.1")


@pytest.mark.parametrize("lapsed", [False, True])
def test_a_batch_leased_when_its_run_was_closed_may_still_be_acked(harness, lapsed):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    held, waiting = harness.batch(), harness.batch("other", learner="m")
    harness.nack(waiting)
    harness.core.close_run("r", harness.now)
    harness.settle()
    assert [event.batch for event in harness.found(events.BatchDissolved)] == [waiting.id]
    if lapsed:
        harness.advance(100.0)
        assert harness.found(events.BatchDissolved)[-1].batch == held.id
        with pytest.raises(BatchSuperseded):
            harness.ack(held, "0.1")
    else:
        assert harness.ack(held, "0.1").version == "0.1"
        assert set(held.groups) <= {group for group, reason in harness.retired().items() if reason == "acked"}
    assert harness.core.groups("r") == []


def test_a_closed_run_redelivers_nothing(harness):
    harness.run(batch_size=2)
    harness.work()
    held = harness.batch("old")
    harness.core.close_run("r", harness.now)
    harness.settle()
    assert harness.empty("new").finished
    with pytest.raises(BatchSuperseded):
        harness.ack(held)


@pytest.mark.parametrize("state", ["leased", "lapsed", "released"])
def test_a_batch_that_was_given_up_is_dissolved_in_any_lease_state(harness, state):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    batch = harness.batch()
    if state == "lapsed":
        harness.advance(100.0)
    elif state == "released":
        harness.nack(batch)
    harness.core.dissolve("r", batch.id, "damaged", harness.now)
    harness.core.dissolve("r", batch.id, "damaged", harness.now)
    assert [event.reason for event in harness.settle()] == ["damaged"]
    with pytest.raises(BatchSuperseded):
        harness.ack(batch)
    harness.core.evict("r", batch.groups[0], harness.now)
    harness.settle()
    again = harness.batch()
    assert again.id != batch.id
    assert again.groups[0] == batch.groups[1]
    harness.ack(again)
    with pytest.raises(BatchAlreadyAcked):
        harness.core.dissolve("r", again.id, "damaged", harness.now)
    with pytest.raises(UnknownBatch):
        harness.core.dissolve("r", "none", "damaged", harness.now)


def test_a_nacked_batch_is_redelivered_whole(harness):
    harness.run(batch_size=2)
    harness.work()
    first = harness.batch()
    harness.nack(first)
    with pytest.raises(BatchSuperseded):
        harness.ack(first)
    again = harness.batch()
    assert (again.id, again.generation) == (first.id, 2)


def test_the_learner_says_what_it_is_doing_and_renews_its_batch_leases(harness):
    harness.run(batch_size=2, batch_lease_s=100)
    harness.work()
    first = harness.batch()
    for _ in range(3):
        harness.advance(60.0)
        request = messages.DoingRequest(learner="l", session="s", doing="training")
        harness.core.doing("r", request, harness.now)
    harness.advance(3.0)
    status = harness.status()
    assert (status.learner_doing, status.learner_doing_s, status.batches_open) == ("training", 3.0, 1)
    assert harness.found(events.BatchReleased) == []
    harness.ack(first)


def test_a_learner_that_got_nothing_counts_as_waiting_until_its_patience_ends(harness):
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

"""Follow-up decisions on groups that are short, late, of zero variance, or too long for a bin."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRunSpec
from headrace.runspec import parse_run_spec
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import BROKEN, Harness, codes

# Short groups -------------------------------------------------------------------------------------------------


def test_with_drop_only_complete_groups_are_served(harness):
    harness.run(group_size=3, batch_size=3, short_groups="drop", retries={"quarantine_after": 9})
    attempts = harness.lease(6)
    broken, whole = attempts[0].group, attempts[3].group
    harness.finish(attempts[0], "failed", failure=BROKEN)
    assert harness.retired() == {broken: "incomplete"}, "the others of it are not waited for"
    assert [cancel.record for cancel in harness.heartbeat().cancels] == [True, True]
    assert harness.status().in_flight == 2, "another was admitted instead"
    for attempt in attempts[3:]:
        harness.finish(attempt)
    assert harness.batch().groups == [whole]


# Partial groups -----------------------------------------------------------------------------------------------


def late(harness: Harness, **spec: object) -> list:
    """A group of four of which one has ended and one is queued again, and its deadline is 20 s away."""
    harness.run(group_size=4, batch_size=4, max_staleness=0, partial_after_s=20, **spec)
    attempts = harness.lease(4)
    harness.finish(attempts[0])
    harness.hand_back([attempts[3]])
    return attempts


def test_a_partial_group_is_served_with_its_true_size_after_its_deadline(harness):
    attempts = late(harness)
    harness.advance(19.0)
    assert harness.events_of(events.GroupCut) == []
    harness.advance(1.0)
    assert [event.group for event in harness.events_of(events.GroupCut)] == [attempts[0].group]
    assert harness.ends(attempts[3].episode) == ["cancelled"], "queued again, at no worker"
    cancels = harness.heartbeat().cancels
    assert {(cancel.episode, cancel.reason) for cancel in cancels} == {
        (attempts[1].episode, "partial"),
        (attempts[2].episode, "partial"),
    }
    harness.finish(attempts[1], "cancelled")
    assert codes(harness.empty()) == ["collecting"], "one has not answered yet"
    harness.finish(attempts[2])
    plan = harness.batch()
    assert plan.groups == [attempts[0].group]
    assert harness.status().selected == {"fifo": 1, "partial": 1, "short": 1, "zero_variance": 1}
    assert harness.status().episodes == {"finished": 2, "cancelled": 2}, "a result that came after all is used"


def test_a_cut_group_waits_one_term_for_a_worker_that_does_not_stop(harness):
    attempts = late(harness, attempt_lease_s=30)
    for _ in range(20):
        harness.advance(1.0)
        harness.heartbeat()
    for _ in range(30):
        harness.advance(1.0)
        harness.heartbeat()
    assert harness.batch().groups == [attempts[0].group]
    failures = {event.episode: event.failure for event in harness.events_of(events.EpisodeEnded) if event.failure}
    assert {failure.kind for failure in failures.values()} == {"partial"}


def test_members_that_were_never_dispatched_leave_no_trajectory(harness):
    harness.run(group_size=4, batch_size=4, max_staleness=0, partial_after_s=20)
    (attempt,) = harness.lease(1)
    harness.finish(attempt)
    harness.advance(20.0)
    assert harness.batch().groups == [attempt.group]
    assert len(harness.events_of(events.EpisodeEnded)) == 1
    assert harness.status().in_flight == 1


def test_a_group_of_which_no_member_has_ended_is_not_cut(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0, partial_after_s=20)
    harness.lease(2)
    for _ in range(100):
        harness.advance(1.0)
        harness.heartbeat()
    assert harness.events_of(events.GroupCut) == []


def test_nothing_is_added_to_a_group_that_was_cut(harness):
    attempts = late(harness)
    harness.advance(20.0)
    harness.finish(attempts[1], "failed", failure=BROKEN)
    harness.finish(attempts[2], "cancelled")
    assert harness.events_of(events.MemberAdded) == []
    assert harness.batch().groups == [attempts[0].group]


def test_a_group_that_was_cut_and_goes_stale_is_retired(harness):
    attempts = late(harness)
    harness.advance(20.0)
    harness.announce("0.1")
    assert harness.retired() == {attempts[0].group: "stale"}
    harness.finish(attempts[1], "cancelled")
    harness.finish(attempts[2], "cancelled")
    assert harness.status().in_flight == 1


def test_after_a_restart_and_after_a_stall_a_group_waits_anew(harness):
    late(harness)
    harness.advance(19.0)
    harness.restart()
    harness.advance(19.0)
    harness.stall(300.0)
    assert harness.events_of(events.GroupCut) == []
    harness.advance(1.5)
    assert len(harness.events_of(events.GroupCut)) == 1


def test_a_group_whose_cut_the_log_shows_only_by_its_cancelled_members_was_cut(harness):
    late(harness)
    harness.advance(20.0)
    log = [event for event in harness.log if not isinstance(event, events.GroupCut)]
    core = harness.replayed(log)
    assert core.durable() == harness.core.durable()


def test_a_spec_that_contradicts_itself_is_refused():
    with pytest.raises(InvalidRunSpec, match="short_groups = 'drop' excludes"):
        parse_run_spec({"name": "r", "short_groups": "drop", "partial_after_s": 3})
    with pytest.raises(InvalidRunSpec, match="max_replaced needs"):
        parse_run_spec({"name": "r", "zero_variance": "drop", "max_replaced": 3})


# Zero variance ------------------------------------------------------------------------------------------------


def play(harness: Harness, equal: bool) -> str:
    """One group of two, with equal rewards or not."""
    attempts = harness.lease(2)
    for attempt in attempts:
        harness.finish(attempt, rewards={"agent": 0.5 if equal else float(attempt.member)})
    return attempts[0].group


def test_zero_variance_groups_are_kept_and_counted(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0)
    groups = [play(harness, equal) for equal in (True, False)]
    assert harness.batch().groups == groups
    assert harness.status().selected == {"fifo": 2, "zero_variance": 1}


def test_a_batch_is_smaller_by_the_zero_variance_groups_that_were_dropped_from_it(harness):
    harness.run(group_size=2, batch_size=6, max_staleness=0, zero_variance="drop")
    dropped = [play(harness, True), play(harness, True)]
    assert harness.retired() == dict.fromkeys(dropped, "zero-variance")
    assert harness.status().in_flight == 3, "their credit came back at once"
    reply = harness.empty()
    assert reply.reasons[0].message == (
        "Since the last batch 2 groups whose returns are all equal were dropped; the batch will be smaller by them."
    )
    served = play(harness, False)
    assert harness.batch().groups == [served]
    play(harness, False)
    assert "zero-variance" not in codes(harness.empty()), "counted from batch to batch"


def test_awaited_groups_take_no_place_in_a_batch_that_others_are_dropped_from(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0, zero_variance="drop")
    play(harness, True)
    played = [play(harness, False)]
    harness.batch()
    harness.submit("equal", "other")
    for attempt in harness.lease(8):
        equal = attempt.group == "equal"
        harness.finish(attempt, rewards={"agent": 0.5 if equal else float(attempt.member)})
        played += [attempt.group] * (attempt.group not in (*played, "equal", "other"))
    assert "zero-variance" not in codes(harness.empty(groups=["equal"]))
    assert harness.batch(groups=["other"]).groups == ["other"]


def test_a_batch_never_shrinks_to_nothing(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0, zero_variance="drop")
    for _ in range(5):
        play(harness, True)
    assert "zero-variance" in codes(harness.empty())
    served = play(harness, False)
    assert harness.batch().groups == [served]


def test_a_budget_of_tokens_shrinks_by_the_tokens_of_dropped_groups(harness):
    harness.run(group_size=2, batch_tokens=500, max_staleness=0, zero_variance="drop")
    for equal in (True, True, False):
        group = play(harness, equal)
    assert harness.batch().groups == [group]


def test_zero_variance_groups_are_replaced_in_the_same_batch_up_to_the_bound(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0, zero_variance="replace", max_replaced=2)
    replaced = [play(harness, True), play(harness, True)]
    first = play(harness, False)
    reply = harness.empty()
    assert next(reason.message for reason in reply.reasons if reason.code == "zero-variance") == (
        "Since the last batch 2 groups whose returns are all equal were replaced; after 2 such groups are served as "
        "they are."
    )
    kept = play(harness, True)
    batch = harness.batch()
    assert batch.groups == [first, kept], "a policy that solves all is not starved"
    assert harness.retired() == dict.fromkeys(replaced, "zero-variance")
    harness.ack(batch)
    play(harness, True)
    assert len(harness.retired()) == 5, "a new batch, a new bound"


def test_without_a_bound_of_its_own_a_run_replaces_three_batches_of_groups(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=0, zero_variance="replace")
    for _ in range(6):
        play(harness, True)
    kept = [play(harness, True), play(harness, True)]
    assert harness.batch().groups == kept
    assert len(harness.retired()) == 6


# Bins ---------------------------------------------------------------------------------------------------------


def test_a_group_with_a_row_that_fits_into_no_bin_is_retired_and_the_answer_to_a_pull_says_so(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0, bin_tokens=100)
    attempts = harness.lease(2)
    harness.finish(attempts[0], longest_row=101, row_tokens=150)
    assert harness.retired() == {attempts[0].group: "row-too-long"}, "the rest of it is not waited for"
    reason = harness.empty().reasons[0]
    assert reason.code == "row-too-long"
    assert reason.message.startswith(
        "Since the last batch 1 group had a row longer than 100 tokens, which fits into no"
    )
    harness.finish(attempts[1], "cancelled")
    for attempt in harness.lease(2):
        harness.finish(attempt, longest_row=100)
    harness.batch()
    assert "row-too-long" not in codes(harness.empty())


def test_an_awaited_group_with_a_row_that_fits_into_no_bin_ends_with_that_reason(harness):
    harness.run(source="learner", bin_tokens=100)
    harness.submit("g")
    harness.finish(harness.lease(1)[0], longest_row=101)
    reply = harness.empty(groups=["g"])
    assert (codes(reply), reply.reasons[0].facts["reason"]) == (["group-ended"], "row-too-long")


def test_rewards_that_differ_only_by_rounding_are_of_zero_variance(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0, zero_variance="drop")
    first, second = harness.lease(2)
    harness.finish(first, rewards={"agent": 1.0}, reward_errors={"agent": 1e-6})
    harness.finish(second, rewards={"agent": 1.0 + 1.2e-7}, reward_errors={"agent": 1e-6})
    assert harness.retired() == {first.group: "zero-variance"}


def test_each_agent_is_compared_over_the_members_in_which_it_has_rows(harness):
    harness.run(group_size=3, batch_size=3, max_staleness=0, zero_variance="drop")
    first, second, third = harness.lease(3)
    harness.finish(first, rewards={"a": 1.0, "b": 0.0})
    harness.finish(second, rewards={"a": 1.0, "b": 0.0})
    harness.finish(third, rewards={"a": 1.0})
    assert harness.retired() == {first.group: "zero-variance"}, "as the manifest would state it"

"""Leasing and judging: what workers get, and what becomes of what they send."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import InternalError, InvalidTrajectory, VersionUnknown
from headrace.trajectory import Failure
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.groups import TERMINAL
from tests.orchestrator.scheduler.harness import BROKEN, FLAKY, NO_POLICY, Harness, codes, version

# Granting -----------------------------------------------------------------------------------------------------


def test_a_worker_gets_attempts_of_its_pool_only_and_only_those_whose_capabilities_it_offers(harness):
    harness.run("a", pool="cpu")
    harness.run("b", pool="gpu", capabilities=["reasoning-gym"])
    assert harness.lease(4, "plain", pool="gpu") == []
    assert {a.run for a in harness.lease(4, "rich", pool="gpu", capabilities=["reasoning-gym", "x"])} == {"b"}
    assert {a.run for a in harness.lease(4, "other", pool="cpu", capabilities=["reasoning-gym"])} == {"a"}


def test_environments_that_run_programs_go_to_workers_with_a_sandbox(harness):
    for number, environment in enumerate(("code:Basics-v0", "python:math:Arithmetic-v0", "x:python:code:y")):
        harness.run(f"m{number}", environments=[{"id": environment}])
    harness.run("list", environments=[], tasks=[{"environment": "code:Rows-v0"}])
    harness.run("plain", environments=[{"id": "game:code"}])
    assert {a.run for a in harness.lease(64, "plain")} == {"plain"}
    assert {a.run for a in harness.lease(64, "rich", capabilities=["sandbox"])} == {"m0", "m1", "m2", "list"}


def test_runs_share_a_pool_evenly(harness):
    for name in ("a", "b", "c"):
        harness.run(name, batch_size=64)
    harness.lease(6, "w0")
    attempts = harness.lease(6, "w1") + harness.lease(3, "w2")
    assert {run: sum(a.run == run for a in attempts) for run in "abc"} == {"a": 3, "b": 3, "c": 3}
    assert [harness.status(run).leased for run in "abc"] == [5, 5, 5]


def test_max_concurrent_limits_leased_episodes_not_admission(harness):
    harness.run(batch_size=64, max_concurrent=5)
    first = harness.lease(100)
    assert len(first) == 5
    assert harness.status().in_flight == 128
    harness.finish(first[0])
    assert len(harness.lease(100)) == 1


def test_evaluation_goes_first_up_to_its_share_of_the_pools_slots(harness):
    harness.run(batch_size=64, evaluation_slots=0.25)
    harness.evaluate(32)
    attempts = harness.lease(16, slots=16)
    assert sum(bool(a.evaluation) for a in attempts) == 4
    for attempt in attempts:
        if not attempt.evaluation:
            harness.finish(attempt)
    assert not any(a.evaluation for a in harness.lease(12, slots=16))


def test_evaluation_goes_beyond_its_share_where_training_has_nothing_queued(harness):
    harness.run(batch_size=1, max_staleness=0)
    harness.evaluate(8)
    attempts = harness.lease(8, slots=8)
    assert sum(bool(a.evaluation) for a in attempts) == 7


def test_a_grant_whose_reply_was_lost_is_granted_again(harness):
    harness.run()
    granted = harness.lease(4)
    harness.holding["w"] = {granted[0].episode: harness.holding["w"][granted[0].episode]}
    assert harness.lease(3) == granted[1:]
    harness.holding["w"] = {}
    assert harness.lease(2) == granted[:2], "no more than there are free slots"
    assert len(harness.found(events.Dispatched)) == 1


def test_a_lost_grant_that_is_not_wanted_any_more_is_ended_by_the_scheduler(harness):
    harness.run(max_staleness=0)
    (attempt,) = harness.lease(1)
    harness.announce("0.1")
    harness.holding["w"] = {}
    assert attempt.episode not in {a.episode for a in harness.lease(1)}
    assert harness.ends(attempt.episode) == ["cancelled"]


def test_a_draining_worker_gets_nothing_new(harness):
    harness.run()
    harness.lease(1)
    harness.core.drain_worker("w", harness.now)
    harness.core.drain_worker("w", harness.now)
    assert len(harness.settle()) == 1
    reply = harness.lease_reply(4)
    assert (reply.attempts, reply.drain) == ([], True)
    assert harness.heartbeat().drain
    harness.holding["w"] = {}
    harness.lease_reply(4)
    assert harness.found(events.AttemptEnded)[0].counts is False, "what never reached it is queued again"


# Leases -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_renews_what_it_lists(harness):
    harness.run(attempt_lease_s=30)
    kept, lost = harness.lease(2)
    harness.holding["w"].pop(lost.episode)
    for _ in range(5):
        harness.advance(20.0)
        harness.heartbeat()
    ended = harness.found(events.AttemptEnded)
    assert [(event.episode, event.reason, event.counts) for event in ended] == [(lost.episode, "dropped", True)]
    assert harness.finish(kept) == "accepted"


def test_a_heartbeat_says_when_the_next_is_wanted(harness):
    assert harness.heartbeat().interval_s == 10.0
    harness.run(attempt_lease_s=6)
    assert harness.heartbeat().interval_s == 2.0


def test_an_expired_lease_requeues_with_the_next_attempt_and_the_old_one_is_superseded(harness):
    harness.run(attempt_lease_s=30)
    (old,) = harness.lease(1, "w0")
    harness.advance(30.0)
    new = harness.lease(64, "w1")[0]
    assert (new.episode, new.attempt) == (old.episode, old.attempt + 1)
    assert new.nonce != old.nonce
    cancels = harness.heartbeat("w0").cancels
    assert [(c.episode, c.attempt, c.reason, c.record) for c in cancels] == [(old.episode, 1, "superseded", False)]
    assert harness.finish(old, worker="w0") == "superseded"
    assert harness.finish(new, worker="w1") == "accepted"


def drop(harness: Harness, worker: str = "w") -> None:
    """The worker lives on, and knows nothing of what it was granted, until the leases run out."""
    harness.holding[worker] = {}
    for _ in range(3):
        harness.advance(10.0)
        harness.heartbeat(worker)


def test_the_last_dropped_attempt_ends_the_episode_in_one_failed_record(harness):
    harness.run(attempt_lease_s=30, retries={"max_attempts": 2, "quarantine_after": 9}, short_groups="serve")
    (first,) = harness.lease(1)
    drop(harness)
    second = harness.lease(1)[0]
    assert (second.episode, second.attempt) == (first.episode, 2)
    drop(harness)
    assert harness.ends(first.episode) == ["failed"]
    event = harness.found(events.EpisodeEnded)[0]
    assert (event.by_worker, event.failure.kind, event.attempt) == (False, "dropped", 2)
    assert harness.finish(second) == "superseded"


def test_one_dead_worker_neither_quarantines_a_task_nor_fails_a_group(harness):
    harness.run(tasks=[{"environment": "game:A"}], group_size=4, batch_size=4, attempt_lease_s=30)
    for number in range(4):
        # Granted at different moments, and listed by a heartbeat or not: the worker dies with all of them.
        harness.lease(2, f"spot{number}")
        harness.advance(10.0)
        harness.heartbeat(f"spot{number}")
        late = harness.lease(2, f"spot{number}")
        harness.heartbeat(f"spot{number}", holding=[])
        assert late
        harness.advance(45.0)
    ended = harness.found(events.AttemptEnded)
    assert {(event.reason, event.counts) for event in ended} == {("worker lost", False)}
    assert len(ended) == 16
    assert harness.found(events.TaskQuarantined) == []
    assert harness.work("steady") == 4
    assert len(harness.batch().groups) == 1


def test_a_task_that_crashes_its_worker_each_time_ends(harness):
    harness.checked = False
    harness.run(
        tasks=[{"environment": "game:A"}],
        group_size=2,
        batch_size=2,
        retries={"max_attempts": 1, "quarantine_after": 2},
        attempt_lease_s=30,
    )
    number = 0
    while not harness.retired():
        number += 1
        assert harness.lease(2, f"w{number}")
        harness.advance(30.0)
        if number == 11:
            assert harness.found(events.TaskQuarantined) == [], "one worker that took two counts once"
    failures = [event.failure for event in harness.found(events.EpisodeEnded)]
    assert {failure.layer for failure in failures} == {"infrastructure"}
    assert [failure.kind for failure in failures] == ["lease-expired"] * 3 + ["quarantined"]
    assert number == 22
    assert len(harness.found(events.TaskQuarantined)[0].history) == 2


def test_a_tick_that_comes_late_expires_nothing(harness):
    harness.run(batch_size=2, attempt_lease_s=30, batch_lease_s=90, max_staleness=2)
    for attempt in harness.lease(2):
        harness.finish(attempt)
    batch = harness.batch()
    attempts = harness.lease(2)
    harness.advance(8.0)
    assert harness.stall(500.0) == []
    harness.heartbeat("another")
    harness.advance(29.0)
    assert harness.found(events.AttemptEnded) == []
    harness.advance(1.0)
    assert len(harness.found(events.AttemptEnded)) == len(attempts), "once"
    assert harness.found(events.BatchReleased) == []
    harness.advance(60.0)
    assert [event.batch for event in harness.found(events.BatchReleased)] == [batch.id]


def test_a_command_that_comes_first_after_a_stall_renews_all_the_same(harness):
    harness.run(attempt_lease_s=30)
    harness.lease(1)
    harness.now += 31.0
    harness.heartbeat("another")
    harness.advance(29.0)
    assert harness.found(events.AttemptEnded) == []


def test_a_drain_is_over_when_its_worker_has_gone(harness):
    harness.run(batch_size=8)
    harness.core.drain_worker("w", harness.now)
    assert harness.lease_reply(1).drain
    harness.advance(30.0)
    assert harness.lease_reply(1).drain, "it is there"
    harness.advance(61.0)
    reply = harness.lease_reply(1)
    assert (reply.drain, len(reply.attempts)) == (False, 1)
    assert [event.over for event in harness.found(events.WorkerDraining)] == [False, True]


def test_a_drain_of_a_worker_that_never_came_back_is_forgotten(harness):
    harness.core.drain_worker("w", harness.now)
    harness.settle()
    harness.restart()
    harness.advance(100.0)
    harness.restart()
    assert harness.core.durable()["draining"] == []


def test_hand_back_draws_no_budget_and_the_attempt_number_goes_on(harness):
    harness.run(retries={"max_attempts": 1})
    for number in range(1, 6):
        (attempt,) = harness.lease(1)
        assert attempt.attempt == number
        harness.hand_back([attempt])
        harness.hand_back([attempt])
    assert len(harness.found(events.AttemptEnded)) == 5
    assert harness.finish(harness.lease(1)[0]) == "accepted"


def test_an_outage_of_three_lease_terms_reruns_nothing(harness):
    harness.run(attempt_lease_s=30)
    attempts = harness.lease(8)
    harness.now += 90.0
    harness.restart()
    harness.now += 29.0
    harness.heartbeat()
    harness.advance(29.0)
    for attempt in attempts:
        assert harness.finish(attempt) == "accepted"
    assert harness.found(events.AttemptEnded) == []


def test_a_worker_that_does_not_stop_is_not_waited_for_longer_than_a_term(harness):
    harness.run(attempt_lease_s=30, max_staleness=0)
    (attempt,) = harness.lease(1)
    harness.announce("0.1")
    for _ in range(4):
        assert [c.record for c in harness.heartbeat().cancels] == [True]
        harness.advance(7.0)
    harness.advance(7.0)
    assert harness.ends(attempt.episode) == ["cancelled"]
    assert [(c.reason, c.record) for c in harness.heartbeat().cancels] == [("over", False)]


def test_a_lease_only_gets_longer_so_the_watched_moment_of_a_worker_is_never_too_late(harness):
    harness.run("short", attempt_lease_s=10)
    harness.run("long", attempt_lease_s=100)
    harness.lease(2)
    harness.advance(9.0)
    harness.heartbeat()
    harness.advance(1.0)
    assert harness.found(events.AttemptEnded) == []
    harness.advance(8.0)
    assert harness.found(events.AttemptEnded) == []
    assert harness.core.next_deadline() == harness.now + 1
    harness.advance(1.0)
    assert len(harness.found(events.AttemptEnded)) == 1


def test_workers_that_hold_nothing_and_say_nothing_are_forgotten(harness):
    harness.lease(1, "idle")
    assert [w.worker for w in harness.core.worker_statuses(harness.now)] == ["idle"]
    harness.advance(100.0)
    assert harness.core.worker_statuses(harness.now) == []


def test_worker_statuses_show_slots_leases_and_stats(harness):
    harness.run()
    harness.lease(2, slots=8, capabilities=["b", "a"])
    request = messages.HeartbeatRequest(worker="w", slots=8, stats={"event_loop_lag_s": 0.5})
    harness.core.heartbeat(request, harness.now)
    (status,) = harness.core.worker_statuses(harness.now + 3.0)
    assert (status.slots, status.leased, status.seen_s, status.draining) == (8, 2, 3.0, False)
    assert (status.capabilities, status.stats) == (["a", "b"], {"event_loop_lag_s": 0.5})


# Judging ------------------------------------------------------------------------------------------------------


def test_an_unknown_episode_is_superseded(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    assert harness.finish(msgspec.structs.replace(attempt, episode="long gone")) == "superseded"


def test_a_wrong_nonce_or_another_worker_is_not_yours(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    assert harness.finish(attempt, nonce="guessed") == "not-yours"
    assert harness.finish(attempt, worker="thief") == "not-yours"
    assert harness.finish(msgspec.structs.replace(attempt, attempt=2)) == "not-yours"
    assert harness.finish(attempt) == "accepted"


def test_a_repeated_submission_is_a_duplicate_and_changes_nothing(harness):
    harness.run(group_size=2)
    (attempt,) = harness.lease(1)
    assert harness.finish(attempt) == "accepted"
    before = harness.core.durable()
    assert harness.finish(attempt, "failed") == "duplicate"
    assert harness.finish(attempt, nonce="guessed") == "superseded"
    assert harness.core.durable() == before


def test_a_retryable_failure_is_queued_again_at_the_front_until_the_budget_is_spent(harness):
    harness.run(retries={"max_attempts": 3, "quarantine_after": 9}, short_groups="serve")
    episode = ""
    for number in range(1, 4):
        attempt = harness.lease(1)[0]
        assert attempt.episode == (episode or attempt.episode)
        episode = attempt.episode
        expected = "retrying" if number < 3 else "accepted"
        assert harness.finish(attempt, "failed", failure=FLAKY) == expected
    assert harness.ends(episode) == ["failed"]


def test_a_result_of_an_expired_attempt_that_was_not_granted_again_is_accepted(harness):
    harness.run(attempt_lease_s=30)
    first, second, third = harness.lease(3)
    harness.advance(200.0)
    assert harness.status().leased == 0
    assert harness.finish(second, "failed", failure=FLAKY) == "retrying"
    assert harness.finish(first) == "accepted"
    harness.restart()
    assert harness.finish(third) == "accepted"
    assert harness.finish(first) in ("duplicate", "superseded")


def test_any_result_of_a_cancelled_attempt_is_its_one_terminal_record(harness):
    harness.run(group_size=4, max_staleness=0, batch_size=4)
    attempts = harness.lease(4)
    harness.announce("0.1")
    low = version("0.0")
    assert harness.finish(attempts[0], "finished", low=low) == "accepted"
    assert harness.finish(attempts[1], "cancelled") == "accepted"
    assert harness.finish(attempts[2], "failed", failure=FLAKY) == "accepted"
    assert harness.finish(attempts[3], "truncated", low=low) == "accepted"
    assert harness.finish(attempts[0], low=low) == "superseded"
    assert [harness.ends(a.episode) for a in attempts] == [["finished"], ["cancelled"], ["failed"], ["truncated"]]
    assert harness.status().groups.eligible == 0


def test_rows_may_carry_versions_that_were_announced_or_the_next_one(harness):
    harness.run(group_size=4)
    harness.announce("0.5")
    a, b, c, _ = harness.lease(4)
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("0.7"))
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("0.5"), high=version("0.7"))
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("1.5"))
    assert harness.finish(a, low=version("0.6")) == "accepted"
    assert harness.finish(b, low=version("0.4"), high=version("0.6")) == "accepted"
    assert harness.finish(c, low=None) == "accepted"


def test_a_record_that_names_another_group_is_refused(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    with pytest.raises(InvalidTrajectory, match="it was granted as member 0"):
        harness.finish(msgspec.structs.replace(attempt, group="another"))


def test_a_record_that_contradicts_its_grant_is_refused(harness):
    harness.run()
    harness.evaluate()
    trained, evaluated = sorted(harness.lease(2, slots=4), key=lambda attempt: attempt.evaluation)
    for attempt, fields in (
        (trained, {"task": evaluated.task}),
        (trained, {"evaluation": evaluated.evaluation}),
        (trained, {"by_worker": False}),
        (evaluated, {"evaluation": ""}),
    ):
        with pytest.raises(InvalidTrajectory):
            harness.finish(attempt, **fields)
    assert [harness.finish(attempt) for attempt in (trained, evaluated)] == ["accepted", "accepted"]


# Failures -----------------------------------------------------------------------------------------------------


def test_a_member_that_failed_for_good_is_topped_up_on_the_same_task(harness):
    harness.run(group_size=2, batch_size=2)
    attempts = harness.lease(2)
    harness.finish(attempts[0], "failed")
    harness.finish(attempts[1])
    assert harness.status().in_flight == 2
    (fresh,) = harness.lease(1)
    assert (fresh.group, fresh.member, fresh.task) == (attempts[0].group, 2, attempts[0].task)
    assert fresh.sampling_seed not in {a.sampling_seed for a in attempts}
    harness.finish(fresh)
    assert harness.batch().groups == [fresh.group]


def test_at_most_group_size_extra_members_are_added(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 99})
    attempts = harness.lease(2)
    group = attempts[0].group
    for _ in range(2):
        for attempt in attempts:
            assert harness.retired() == {}
            harness.finish(attempt, "failed")
        attempts = harness.lease(2)
    assert harness.retired() == {group: "failed"}
    assert len(harness.found(events.MemberAdded)) == 2
    assert harness.status().in_flight == 2


def test_a_task_that_killed_too_many_attempts_is_quarantined_with_its_history(harness):
    harness.run(
        tasks=[{"environment": "game:A", "seed": 1}, {"environment": "game:A", "seed": 2}],
        epochs=2,
        group_size=3,
        batch_size=3,
        attempt_lease_s=30,
        retries={"quarantine_after": 2, "max_attempts": 5},
    )
    first, second = harness.lease(2)
    harness.hand_back([second])
    (second,) = harness.lease(1)
    harness.finish(first, "failed", failure=BROKEN)
    harness.hand_back([second])
    assert harness.found(events.TaskQuarantined) == []
    (second,) = harness.lease(1)
    drop(harness)
    (quarantined,) = harness.found(events.TaskQuarantined)
    assert quarantined.task == first.task
    assert "environment/crashed: It raised." in quarantined.history[0]
    assert "dropped at worker w" in quarantined.history[1]
    assert harness.ends(second.episode) == ["failed"], "it was dispatched before"
    assert len(harness.found(events.EpisodeEnded)) == 2, "what was never dispatched leaves no record"
    assert harness.retired() == {first.group: "failed"}
    assert harness.status().quarantined == 1
    harness.holding["w"] = {}
    harness.work()
    assert {r.task.seed for r in harness.found(events.GroupAdmitted)} == {1, 2}
    assert [r.task.seed for r in harness.found(events.GroupAdmitted)].count(1) == 1


def test_answers_that_are_wrong_quarantine_the_task_that_gets_them(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 2, "max_attempts": 2})
    broken = Failure(layer="policy", kind="logprob-nan", message="Turn 1: position 4 is NaN.", retryable=False)
    for attempt in harness.lease(2):
        harness.finish(attempt, "failed", failure=broken)
    (quarantined,) = harness.found(events.TaskQuarantined)
    assert "policy/logprob-nan: Turn 1: position 4 is NaN." in quarantined.history[0]


def test_policy_failures_spend_attempts_but_quarantine_no_task(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 1, "max_attempts": 2})
    for attempt in harness.lease(2):
        harness.finish(attempt, "failed", failure=NO_POLICY)
    assert harness.found(events.TaskQuarantined) == []


def test_a_policy_that_fails_is_named_as_the_reason(harness):
    harness.run(group_size=2, batch_size=2)
    for attempt in harness.lease(4):
        harness.finish(attempt, "failed", failure=NO_POLICY)
    reply = harness.empty()
    assert "policy-failing" in codes(reply)
    message = next(reason.message for reason in reply.reasons if reason.code == "policy-failing")
    assert "4 of the last 4 attempts failed there, the last with unreachable: Connection refused." in message


# States -------------------------------------------------------------------------------------------------------


def test_an_illegal_move_raises_with_the_story_of_what_led_there(harness):
    harness.run(group_size=2)
    (attempt,) = harness.lease(1)
    harness.finish(attempt)
    core = harness.replayed()
    with pytest.raises(InternalError, match=r"from finished to queued by lost\. .*queued → leased \(Dispatched\)"):
        core.apply(
            events.AttemptEnded(run="r", episode=attempt.episode, attempt=1, reason="lost", counts=False), harness.now
        )


def test_terminal_is_terminal(harness):
    harness.run(group_size=4, max_staleness=0, batch_size=4)
    attempts = harness.lease(3)
    for attempt, status in zip(attempts, ("finished", "truncated", "failed"), strict=True):
        harness.finish(attempt, status)
    for status in ("finished", "truncated", "failed", "cancelled"):
        for attempt in attempts:
            outcome = harness.outcome(attempt, status)
            with pytest.raises(InternalError, match="cannot go from"):
                harness.replayed().apply(outcome, harness.now)
    assert {"finished", "truncated", "failed", "cancelled", "vanished"} == TERMINAL


def test_an_unknown_name_in_a_fact_is_an_error_that_says_so(harness):
    harness.run()
    with pytest.raises(InternalError, match="GroupRetired is about 'nowhere', which is not known here"):
        harness.replayed().apply(events.GroupRetired(run="nowhere", group="g", reason="stale"), harness.now)

"""Attempt leases: granted, renewed, handed back."""

from __future__ import annotations

from headrace_orchestrator.scheduler import events

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
    assert len(harness.events_of(events.Dispatched)) == 1


def test_a_lost_grant_of_a_cancelled_attempt_is_ended_by_the_scheduler(harness):
    harness.run(max_staleness=0)
    (attempt,) = harness.lease(1)
    harness.announce("0.1")
    harness.holding["w"] = {}
    assert attempt.episode not in {a.episode for a in harness.lease(1)}
    assert harness.ends(attempt.episode) == ["cancelled"]


def test_what_was_granted_in_a_lost_reply_and_is_more_than_the_free_slots_is_queued_again(harness):
    harness.run(group_size=8, batch_size=8)
    lost = harness.lease(6, slots=8)
    again = harness.lease(2, slots=8, holding=[])
    assert [(a.episode, a.attempt, a.nonce) for a in again] == [(a.episode, a.attempt, a.nonce) for a in lost[:2]]
    ended = harness.events_of(events.AttemptEnded)
    assert [(event.reason, event.counts) for event in ended] == [("never begun", False)] * 4
    assert {attempt.attempt for attempt in harness.lease(6, "other")} == {1, 2}


def test_a_new_process_under_the_name_of_another_has_none_of_its_attempts_they_are_lost_at_once(harness):
    harness.run(group_size=4, batch_size=4, attempt_lease_s=30)
    held = harness.lease(4, "w0", instance="first")
    harness.heartbeat("w0", instance="first")
    harness.holding["w0"] = {}
    (again,) = harness.lease(1, "w0", instance="second")
    ended = harness.events_of(events.AttemptEnded)
    assert [(event.reason, event.counts) for event in ended] == [("worker lost", False)] * 4
    assert again.episode in {attempt.episode for attempt in held}
    assert again.attempt == 2
    assert {attempt.attempt for attempt in harness.lease(3, "other")} == {2}
    assert harness.finish(held[0], worker="w0", nonce=held[0].nonce) == "superseded"
    harness.advance(29.0)
    harness.heartbeat("w0", instance="second")
    assert len(harness.events_of(events.AttemptEnded)) == 4


def test_the_process_that_lost_its_name_is_told_to_stop_and_takes_nothing_from_the_later_one(harness):
    harness.run(group_size=4, batch_size=4)
    harness.lease(2, "w0", instance="first")
    keys = list(harness.holding["w0"].values())
    harness.holding["w0"] = {}
    later = harness.lease(2, "w0", instance="second")
    for reply in (
        harness.heartbeat("w0", holding=keys, instance="first"),
        harness.lease_reply(2, "w0", instance="first", holding=keys),
    ):
        assert reply.drain
        assert [cancel.episode for cancel in reply.cancels] == [key.episode for key in keys]
    assert [harness.finish(attempt, worker="w0") for attempt in later] == ["accepted"] * 2
    assert harness.lease(2, "w0", instance="second")


def test_a_process_is_known_after_a_restart_of_the_orchestrator(harness):
    harness.run(group_size=4, batch_size=4)
    harness.lease(4, "w0", instance="first")
    for core in (harness.replayed(), harness.restored(harness.core.snapshot())):
        harness.restart(core)
        assert harness.core.state.workers.by_name["w0"].instance == "first"
    harness.holding["w0"] = {}
    assert {attempt.attempt for attempt in harness.lease(4, "w0", instance="second")} == {2}


def test_a_process_that_names_no_instance_is_granted_its_attempts_again_as_the_version_before_does(harness):
    harness.run(group_size=4, batch_size=4)
    granted = harness.lease(4, "w0")
    harness.holding["w0"] = {}
    assert [a.nonce for a in harness.lease(4, "w0")] == [a.nonce for a in granted]
    assert [a.nonce for a in harness.lease(4, "w0", holding=[], instance="first")] == [a.nonce for a in granted]


def test_a_drain_ends_with_the_process_and_not_with_its_name(harness):
    harness.run(group_size=4, batch_size=4)
    harness.lease(1, "w0", instance="first")
    harness.core.drain_worker("w0", harness.now)
    harness.settle()
    assert harness.lease_reply(1, "w0", instance="first").drain
    harness.holding["w0"] = {}
    reply = harness.lease_reply(1, "w0", instance="second")
    assert (reply.drain, len(reply.attempts)) == (False, 1)


def test_a_repeated_drain_does_not_drain_a_later_process_of_the_name(harness):
    harness.run(group_size=4, batch_size=4)
    harness.lease(1, "w0", instance="first")
    harness.core.drain_worker("w0", harness.now, key="k")
    harness.settle()
    harness.restart(harness.restored(harness.core.snapshot()))
    assert not harness.lease_reply(1, "w0", instance="second", holding=[]).drain
    harness.core.drain_worker("w0", harness.now, key="k")
    assert harness.settle() == []
    assert not harness.lease_reply(1, "w0", instance="second").drain
    harness.core.drain_worker("w0", harness.now, key="other")
    harness.settle()
    assert harness.lease_reply(1, "w0", instance="second").drain


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
    assert harness.events_of(events.AttemptEnded)[0].counts is False, "an attempt that never reached it is queued again"


# Leases -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_renews_the_attempts_that_it_lists(harness):
    harness.run(attempt_lease_s=30)
    kept, lost = harness.lease(2)
    harness.heartbeat()
    harness.holding["w"].pop(lost.episode)
    for _ in range(5):
        harness.advance(20.0)
        harness.heartbeat()
    ended = harness.events_of(events.AttemptEnded)
    assert [(event.episode, event.reason, event.counts) for event in ended] == [(lost.episode, "dropped", True)]
    assert harness.finish(kept) == "accepted"


def test_the_reply_to_a_heartbeat_sets_the_interval_to_the_next(harness):
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


def test_hand_back_draws_no_budget_and_attempt_numbers_continue(harness):
    harness.run(retries={"max_attempts": 1})
    for number in range(1, 6):
        (attempt,) = harness.lease(1)
        assert attempt.attempt == number
        harness.hand_back([attempt])
        harness.hand_back([attempt])
    assert len(harness.events_of(events.AttemptEnded)) == 5
    assert harness.finish(harness.lease(1)[0]) == "accepted"


def test_the_wait_for_a_worker_that_does_not_stop_ends_after_one_term(harness):
    harness.run(attempt_lease_s=30, max_staleness=0)
    (attempt,) = harness.lease(1)
    harness.announce("0.1")
    for _ in range(4):
        assert [c.record for c in harness.heartbeat().cancels] == [True]
        harness.advance(7.0)
    harness.advance(7.0)
    assert harness.ends(attempt.episode) == ["cancelled"]
    assert [(c.reason, c.record) for c in harness.heartbeat().cancels] == [("over", False)]

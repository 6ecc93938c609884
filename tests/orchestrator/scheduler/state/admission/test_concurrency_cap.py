"""The concurrency cap of a run's training episodes."""

from __future__ import annotations

from tests.orchestrator.scheduler.harness import Harness, codes


def test_the_cap_limits_training_episodes_at_workers_not_admission(harness):
    harness.run(batch_size=64)
    harness.set_concurrency_cap(5)
    first = harness.lease(100)
    assert len(first) == 5
    assert harness.status().in_flight == 128
    harness.finish(first[0])
    assert len(harness.lease(100)) == 1


def test_a_run_has_no_cap_until_it_is_set(harness):
    harness.run(batch_size=64)
    assert len(harness.lease(100)) == 100
    harness.set_concurrency_cap(5)
    assert harness.lease(4) == []
    assert harness.set_concurrency_cap(None)
    assert len(harness.lease(4)) == 4


def test_a_lower_cap_stops_no_running_episode_and_grants_nothing_until_enough_are_over(harness):
    harness.run(batch_size=64)
    attempts = harness.lease(8)
    assert not harness.set_concurrency_cap(6)
    assert harness.heartbeat().cancels == []
    for attempt in attempts[:2]:
        harness.finish(attempt)
        assert harness.lease(8) == []
    harness.finish(attempts[2])
    assert len(harness.lease(8)) == 1


def test_a_run_is_never_capped_to_nothing(harness):
    harness.run()
    harness.set_concurrency_cap(0)
    assert len(harness.lease(8)) == 1


def test_while_it_holds_training_back_evaluation_keeps_to_its_share(harness):
    harness.run(batch_size=64, evaluation_slots=0.25)
    harness.set_concurrency_cap(2)
    harness.evaluate(32)
    attempts = harness.lease(16, slots=16)
    assert sum(bool(a.evaluation) for a in attempts) == 4
    assert len(attempts) == 6


def test_evaluation_goes_on_while_training_is_at_its_cap(harness):
    harness.run(batch_size=64, evaluation_slots=0.25)
    harness.set_concurrency_cap(2)
    harness.lease(16, slots=16)
    harness.evaluate(2)
    assert [bool(a.evaluation) for a in harness.lease(14, slots=16)] == [True, True]


def test_a_run_at_its_cap_leaves_its_slots_to_others(harness):
    harness.run("a", batch_size=64)
    harness.run("b", batch_size=64)
    harness.set_concurrency_cap(2, run="a")
    attempts = harness.lease(10)
    assert sum(a.run == "a" for a in attempts) == 2
    assert len(attempts) == 10


def test_the_answer_to_a_pull_says_that_the_policy_servers_are_saturated(harness):
    harness.run(batch_size=8)
    harness.set_concurrency_cap(2)
    assert "policy-saturated" not in codes(harness.empty())
    harness.lease(8)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "policy-saturated"]
    assert reason.facts == {"attainable": 2, "leased": 2, "queued": 14}
    assert "take 2 episodes at a time" in reason.message
    assert harness.status().attainable == 2


def test_after_a_restart_a_run_has_no_cap_until_it_is_set_again():
    harness = Harness()
    harness.run(batch_size=64)
    harness.set_concurrency_cap(1)
    harness.lease(4)
    harness.restart()
    assert harness.status().attainable is None

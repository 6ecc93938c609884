"""Top-ups, dropped attempts, lost workers and quarantine."""

from __future__ import annotations

from headrace.trajectory import Failure
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import BROKEN, NO_POLICY, Harness


def drop(harness: Harness, worker: str = "w") -> None:
    """Let the worker list its attempts once, and then send heartbeats that list none, until the leases run out."""
    harness.heartbeat(worker)
    harness.holding[worker] = {}
    for _ in range(3):
        harness.advance(10.0)
        harness.heartbeat(worker)


def test_the_last_dropped_attempt_ends_the_episode_with_one_failure(harness):
    harness.run(attempt_lease_s=30, retries={"max_attempts": 2, "quarantine_after": 9}, short_groups="serve")
    (first,) = harness.lease(1)
    drop(harness)
    second = harness.lease(1)[0]
    assert (second.episode, second.attempt) == (first.episode, 2)
    drop(harness)
    assert harness.ends(first.episode) == ["failed"]
    event = harness.events_of(events.EpisodeEnded)[0]
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
    ended = harness.events_of(events.AttemptEnded)
    assert {(event.reason, event.counts) for event in ended} == {("worker lost", False)}
    assert len(ended) == 16
    assert harness.events_of(events.TaskQuarantined) == []
    assert harness.work("steady") == 4
    assert len(harness.batch().groups) == 1


def test_an_attempt_that_nobody_began_counts_for_nothing(harness):
    harness.run(tasks=[{"environment": "game:A"}], group_size=4, batch_size=4, attempt_lease_s=30)
    for number in range(5):
        # The answer to the lease request is held back, and the heartbeats list nothing.
        assert [attempt.attempt for attempt in harness.lease(4, "w", holding=[])] == [number + 1] * 4
        harness.holding["w"] = {}
        for _ in range(3):
            harness.advance(10.0)
            harness.heartbeat("w")
    assert {(event.reason, event.counts) for event in harness.events_of(events.AttemptEnded)} == {
        ("never begun", False)
    }
    assert harness.events_of(events.TaskQuarantined) == []
    assert {episode.workers_lost for episode in harness.core.state.episodes.values()} == {0}
    assert harness.work() == 4


def test_a_task_that_crashes_each_process_of_one_name_ends(harness):
    harness.checked = False
    harness.run(
        tasks=[{"environment": "game:A"}],
        group_size=2,
        batch_size=2,
        retries={"max_attempts": 1, "quarantine_after": 2},
    )
    number = 0
    while not harness.retired():
        number += 1
        harness.holding["w0"] = {}
        assert harness.lease(2, "w0", instance=f"process{number}") or harness.retired()
        harness.heartbeat("w0", instance=f"process{number}")
    failures = [event.failure for event in harness.events_of(events.EpisodeEnded)]
    assert [failure.kind for failure in failures] == ["lease-expired"] * 3 + ["quarantined"]
    assert "Worker w0 (process process11) was lost" in failures[0].message
    assert number == 23


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
            assert harness.events_of(events.TaskQuarantined) == [], "one worker that took two counts once"
    failures = [event.failure for event in harness.events_of(events.EpisodeEnded)]
    assert {failure.layer for failure in failures} == {"infrastructure"}
    assert [failure.kind for failure in failures] == ["lease-expired"] * 3 + ["quarantined"]
    assert number == 22
    assert len(harness.events_of(events.TaskQuarantined)[0].history) == 2


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


def test_at_most_group_size_members_are_added(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 99})
    attempts = harness.lease(2)
    group = attempts[0].group
    for _ in range(2):
        for attempt in attempts:
            assert harness.retired() == {}
            harness.finish(attempt, "failed")
        attempts = harness.lease(2)
    assert harness.retired() == {group: "failed"}
    assert len(harness.events_of(events.MemberAdded)) == 2
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
    assert harness.events_of(events.TaskQuarantined) == []
    (second,) = harness.lease(1)
    drop(harness)
    (quarantined,) = harness.events_of(events.TaskQuarantined)
    assert quarantined.task == first.task
    assert "environment/crashed: It raised." in quarantined.history[0]
    assert "dropped at worker w" in quarantined.history[1]
    assert harness.ends(second.episode) == ["failed"], "it was dispatched before"
    assert len(harness.events_of(events.EpisodeEnded)) == 2, "an episode that was never dispatched leaves no record"
    assert harness.retired() == {first.group: "failed"}
    assert harness.status().quarantined == 1
    harness.holding["w"] = {}
    harness.work()
    assert {r.task.seed for r in harness.events_of(events.GroupAdmitted)} == {1, 2}
    assert [r.task.seed for r in harness.events_of(events.GroupAdmitted)].count(1) == 1


def test_wrong_responses_of_the_policy_quarantine_the_task(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 2, "max_attempts": 2})
    broken = Failure(layer="policy", kind="logprob-nan", message="Turn 1: position 4 is NaN.", retryable=False)
    for attempt in harness.lease(2):
        harness.finish(attempt, "failed", failure=broken)
    (quarantined,) = harness.events_of(events.TaskQuarantined)
    assert "policy/logprob-nan: Turn 1: position 4 is NaN." in quarantined.history[0]


def test_policy_failures_spend_attempts_but_quarantine_no_task(harness):
    harness.run(group_size=2, batch_size=2, retries={"quarantine_after": 1, "max_attempts": 2})
    for attempt in harness.lease(2):
        harness.finish(attempt, "failed", failure=NO_POLICY)
    assert harness.events_of(events.TaskQuarantined) == []

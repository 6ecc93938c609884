"""Workers: drains, watched leases, silence."""

from __future__ import annotations

from headrace_orchestrator.scheduler import events


def test_a_drain_is_over_when_its_worker_is_gone(harness):
    harness.run(batch_size=8)
    harness.core.drain_worker("w", harness.now)
    assert harness.lease_reply(1).drain
    harness.advance(30.0)
    assert harness.lease_reply(1).drain, "it is there"
    harness.advance(61.0)
    reply = harness.lease_reply(1)
    assert (reply.drain, len(reply.attempts)) == (False, 1)
    assert [event.over for event in harness.events_of(events.WorkerDraining)] == [False, True]


def test_a_drain_of_a_worker_that_never_came_back_is_forgotten(harness):
    harness.core.drain_worker("w", harness.now)
    harness.settle()
    harness.restart()
    harness.advance(100.0)
    harness.restart()
    assert harness.core.durable()["draining"] == []


def test_a_lease_only_gets_longer_so_the_watched_moment_of_a_worker_is_never_too_late(harness):
    harness.run("short", attempt_lease_s=10)
    harness.run("long", attempt_lease_s=100)
    harness.lease(2)
    harness.advance(9.0)
    harness.heartbeat()
    harness.advance(1.0)
    assert harness.events_of(events.AttemptEnded) == []
    harness.advance(8.0)
    assert harness.events_of(events.AttemptEnded) == []
    assert harness.core.next_deadline() == harness.now + 1
    harness.advance(1.0)
    assert len(harness.events_of(events.AttemptEnded)) == 1


def test_silent_workers_that_hold_nothing_are_forgotten(harness):
    harness.lease(1, "idle")
    assert [w.worker for w in harness.core.worker_statuses(harness.now)] == ["idle"]
    harness.advance(100.0)
    assert harness.core.worker_statuses(harness.now) == []


def test_a_worker_that_sent_nothing_for_a_lease_term_is_silent_until_it_is_heard_again(harness):
    harness.run(batch_size=8, attempt_lease_s=6, evaluation_slots=0.5)
    harness.lease(2, slots=8)
    harness.heartbeat()
    assert harness.core.state.workers.slots["default"] == 8
    harness.advance(5.9)
    assert [worker.silent for worker in harness.core.worker_statuses(harness.now)] == [False]
    harness.advance(0.1)
    assert [worker.silent for worker in harness.core.worker_statuses(harness.now)] == [True]
    assert "no workers in pool 'default' (1 silent): 16 episodes queued" in harness.empty().reasons[0].message
    harness.advance(2.0)
    assert harness.core.state.workers.slots["default"] == 0
    harness.heartbeat()
    assert [worker.silent for worker in harness.core.worker_statuses(harness.now)] == [False]
    assert harness.core.state.workers.slots["default"] == 8


def test_the_slots_of_a_silent_worker_are_subtracted_once(harness):
    harness.run(batch_size=8)
    harness.lease(0, slots=8)
    harness.lease(0, "other", slots=4)
    for _ in range(5):
        harness.advance(20.0)
        harness.lease(0, "other", slots=4)
        harness.core.tick(harness.now)
    assert [worker.worker for worker in harness.core.worker_statuses(harness.now)] == ["other"]
    assert dict(harness.core.state.workers.slots) == {"default": 4}

"""Runs, groups and workers as status replies show them."""

from __future__ import annotations

from headrace.wire import messages
from headrace_orchestrator.scheduler.queries import views


def test_worker_statuses_show_slots_leases_and_stats(harness):
    harness.run()
    harness.lease(2, slots=8, capabilities=["b", "a"])
    request = messages.HeartbeatRequest(worker="w", slots=8, stats={"event_loop_lag_s": 0.5})
    harness.core.heartbeat(request, harness.now)
    (status,) = harness.core.worker_statuses(harness.now + 3.0)
    assert (status.slots, status.leased, status.seen_s, status.draining) == (8, 2, 3.0, False)
    assert (status.capabilities, status.stats) == (["a", "b"], {"event_loop_lag_s": 0.5})


def test_a_status_counts_groups_episodes_and_rewards(harness):
    harness.run(group_size=2, batch_size=2)
    attempts = harness.lease(4)
    for number, attempt in enumerate(attempts[:3]):
        harness.finish(attempt, rewards={"a": 1.0, "b": float(number)})
    status = harness.status()
    assert (status.groups.open, status.groups.eligible, status.episodes) == (1, 1, {"finished": 3})
    assert (status.mean_reward, status.leased, status.queued) == (2.0, 1, 0)
    pages = harness.core.groups("r")
    assert [(p["state"], len(p["members"]), len(p["trajectories"]), p["low"]) for p in pages] == [
        ("eligible", 0, 2, "0.0"),
        ("open", 2, 0, "0.0"),
    ]


def test_a_limited_number_of_groups_is_listed(harness, monkeypatch):
    harness.run(group_size=1, batch_size=4)
    harness.work()
    whole = harness.core.groups("r")
    monkeypatch.setattr(views, "MAX_LISTED", 3)
    assert harness.core.groups("r") == whole[:3]

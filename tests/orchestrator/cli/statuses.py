"""Statuses of runs and of the service, for the command line's tests."""

from __future__ import annotations

from typing import Any

from headrace.wire import messages


def run_status(**fields: Any) -> messages.RunStatus:
    defaults: dict[str, Any] = {
        "name": "guess",
        "state": "active",
        "version": "0.3",
        "spec": {"name": "guess", "estimator": {"gamma": 0.5}},
        "groups": messages.GroupCounts(open=2),
        "credit": 1,
        "in_flight": 7,
        "queued": 3,
        "leased": 4,
        "episodes": {"finished": 20, "truncated": 2, "failed": 1},
        "batches_acked": 3,
        "batches_open": 0,
        "learner_doing": "training",
        "learner_doing_s": 12.0,
        "learner_waiting": False,
        "reasons": [],
        "mean_reward": 0.625,
    }
    return messages.RunStatus(**{**defaults, **fields})


def waiting_run() -> messages.RunStatus:
    reasons = [messages.Reason(code="no-workers", message="No worker of pool default is there.")]
    return run_status(learner_waiting=True, learner_doing="waiting", reasons=reasons)


def service_status(**fields: Any) -> messages.ServiceStatus:
    worker = messages.WorkerStatus(
        worker="w1", pool="default", capabilities=[], slots=8, leased=3, seen_s=0.5, draining=False
    )
    defaults: dict[str, Any] = {
        "epoch": 2,
        "version": "0.0.1",
        "uptime_s": 90.0,
        "runs": [waiting_run()],
        "workers": [worker],
        "store": {},
    }
    return messages.ServiceStatus(**{**defaults, **fields})

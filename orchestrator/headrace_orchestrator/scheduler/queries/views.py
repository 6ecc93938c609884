"""Runs, groups and workers as status replies show them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from headrace.wire import messages
from headrace_orchestrator.scheduler.queries.empty_reasons import empty_reasons
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MAX_LISTED = 1000
"""Maximum number of groups in one list: a run may hold a hundred thousand, and a list must not delay other requests."""


def run_status(state: SchedulerState, run: Run, now: float) -> messages.RunStatus:
    """The status of a run, without its spec."""
    name, latest = max(run.learners.items(), key=lambda item: item[1].heard_at, default=("", None))
    reasons, _ = empty_reasons(state, run, now)
    return messages.RunStatus(
        name=run.name,
        state="closed" if run.closed else "finished" if run.done else "active",
        version=str(run.versions.now),
        groups=messages.GroupCounts(
            open=run.group_states["open"],
            eligible=run.group_states["eligible"],
            leased=run.group_states["leased"],
            retired=dict(run.retired),
        ),
        credit=0 if run.closed else run.ledger.free,
        in_flight=run.ledger.in_flight,
        queued=run.queued + run.evaluation_queued,
        leased=run.leased + run.evaluation_leased,
        attainable=run.concurrency_cap.slots,
        episodes=dict(run.episode_ends),
        batches_acked=run.batches_acked,
        batches_open=len(run.batches),
        selected=dict(run.selected),
        learner_doing=latest.doing if latest else "",
        learner_doing_s=now - latest.since if latest else -1.0,
        learner_heard_s=now - latest.heard_at if latest else -1.0,
        learner_silent=latest is not None and latest.is_silent(run.spec.batch_lease_s, now),
        learner_holds=sum(batch.leased and batch.learner == name for batch in run.batches.values()),
        learner_waiting=run.learner_waits(now),
        reasons=reasons,
        shares=run.shares.listed(),
        mean_reward=sum(run.rewards) / len(run.rewards) if run.rewards else None,
        quarantined=len(run.quarantined),
        rowless=run.rowless,
    )


def worker_statuses(state: SchedulerState, now: float) -> list[messages.WorkerStatus]:
    """All known workers."""
    return [
        messages.WorkerStatus(
            worker=worker.name,
            pool=worker.pool,
            capabilities=sorted(worker.capabilities),
            slots=worker.slots,
            leased=len(worker.attempts),
            seen_s=now - worker.seen,
            draining=worker.name in state.workers.draining,
            silent=state.workers.is_silent(worker, now),
            stats=worker.stats,
        )
        for worker in state.workers.by_name.values()
    ]


def groups(run: Run) -> list[dict[str, Any]]:
    """The ``MAX_LISTED`` groups in flight that were admitted first; a complete one lists its usable trajectories, not
    its members."""
    in_flight = (group for group in run.groups.values() if group.state != "retired")
    return [_group(group) for group in islice(in_flight, MAX_LISTED)]


def _group(group: Group) -> dict[str, Any]:
    low = min(group.versions(), default=None)
    return {
        "id": group.id,
        "state": group.state,
        "task": group.task,
        "members": [
            {
                "episode": episode.id,
                "member": episode.member,
                "state": episode.state,
                "attempt": episode.attempt,
                "worker": episode.worker,
            }
            for episode in group.members
        ],
        "trajectories": group.trajectories,
        "low": str(low) if low is not None else "",
        "batch": group.batch,
        "uses": group.uses,
        "submitted": group.submitted,
        "evaluation": group.evaluation.id if group.evaluation is not None else "",
    }

"""The durable state as plain values: equal before and after a replay of all events."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def durable_values(state: SchedulerState) -> dict[str, Any]:
    """The durable state, without soft fields."""
    return {
        "runs": {name: _durable_run(run) for name, run in state.runs.items()},
        "attempts": {
            worker.name: sorted(worker.attempts) for worker in state.workers.by_name.values() if worker.attempts
        },
        "draining": sorted(state.workers.draining),
        "drain_keys": dict(state.workers.drain_keys),
    }


def _durable_run(run: Run) -> dict[str, Any]:
    ledger = run.ledger
    return {
        "closed": run.closed,
        "versions": (run.versions.now, list(run.versions.forks), list(run.versions.tops)),
        "policy_servers": {
            name: getattr(run.policy_servers, name)
            for name in PolicyServersState.__slots__
            if name not in ("reasons", "probed")
        },
        "position": run.position,
        "returned": list(run.returned),
        "shares": (dict(run.shares.drawn), dict(run.shares.trained)),
        "in_progress": list(run.in_progress),
        "admitted": run.admitted,
        "next_dispatch_order": run.next_dispatch_order,
        "ledger": (ledger.in_flight, ledger.unfinished, ledger.held_bytes, ledger.estimate, ledger.batch_groups),
        "groups": {id: _durable_group(group) for id, group in run.groups.items()},
        "queues": [[e.id for e in queue if e.state == "queued"] for queue in (run.queue, run.evaluation_queue)],
        "counts": (run.queued, run.evaluation_queued, run.leased, run.evaluation_leased, run.open),
        "eligible": (run.eligible.contents(), run.eligible_by_name.contents()),
        "batches": {
            batch.id: (
                [group.id for group in batch.groups],
                batch.version,
                batch.leased,
                batch.lapsed,
                batch.generation,
                batch.learner,
                batch.session,
                batch.request,
                batch.shards,
                batch.fetched,
                batch.release_reason,
                batch.before,
            )
            for batch in run.batches.values()
        },
        "sessions": {name: msgspec.to_builtins(sessions) for name, sessions in run.sessions.items()},
        "closed_batches": dict(run.closed_batches),
        "batches_formed": run.batches_formed,
        "batches_acked": run.batches_acked,
        "zero_variance": (run.zero_variance_since_batch, run.zero_variance_tokens),
        "too_long": run.too_long_since_batch,
        "prompts_differ": dict(run.prompts_differ_since_batch),
        "rowless": (run.rowless, dict(run.rowless_since_batch), run.unusable_in_row),
        "selected": dict(run.selected),
        "evaluations": {
            e.id: (e.version, e.wanted, e.left, e.done, e.reason, list(e.episodes)) for e in run.evaluations.values()
        },
        "active_evaluations": list(run.active_evaluations),
        "submitted_ends": dict(run.submitted_ends),
        "submitted_failures": dict(run.submitted_failures),
        "retired": dict(run.retired),
        "ends": dict(run.episode_ends),
        "rewards": list(run.rewards),
        "recent": list(run.recent_failures),
        "rewinds": dict(run.rewinds),
        "kills": {key: list(kills) for key, kills in run.kills.items()},
        "quarantined": dict(run.quarantined),
    }


def _durable_group(group: Group) -> dict[str, Any]:
    return {
        "state": group.state,
        "numbers": (
            group.size,
            group.added_members,
            group.live,
            group.usable,
            group.rowless,
            group.first_prompt,
            group.prompts_differ,
            group.dispatch_order,
            group.uses,
            group.held_bytes,
        ),
        "priority": group.priority,
        "adapters": group.adapters,
        "batch": group.batch,
        "reason": group.reason,
        "trajectories": group.trajectories,
        "kept": group.kept_versions,
        "members": [
            (
                e.id,
                e.member,
                e.state,
                e.attempt,
                e.nonce,
                e.worker,
                e.retries_used,
                e.workers_lost,
                e.version,
                e.low,
                e.high,
                e.trajectory,
            )
            for e in group.members
        ],
    }

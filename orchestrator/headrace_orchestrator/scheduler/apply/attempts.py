"""Transitions of attempts and episodes, and of the workers that hold them.

* An event that does not fit changes nothing and raises; the grants of a dispatch that fit are applied.
* A lost result costs only itself; the events after it are applied as far as they fit.
* A cancelled attempt proves that its group was retired.
* One dead worker draws no retry budget and quarantines no task; an episode that lost too many counts once per worker.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InternalError
from headrace.trajectory import Failure, Version
from headrace.wire.policy_server import BAD_RESPONSE_KINDS
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.group_progress import (
    assign_dispatch_order,
    count_ended,
    drop_undispatched,
    review,
)
from headrace_orchestrator.scheduler.apply.groups import cut, retire
from headrace_orchestrator.scheduler.state.admission.task_sources import task_key
from headrace_orchestrator.scheduler.state.groups import AT_WORKER, Episode, Group
from headrace_orchestrator.scheduler.state.policy_servers import IN_PROCESS
from headrace_orchestrator.scheduler.state.run import LostAttempt, Run, remember
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

LEASE_EXPIRED = "lease-expired"
"""Kind of the failure that ends an episode which lost too many workers."""

UNCOUNTED_KINDS = frozenset({"drained", "cancelled", "quarantined"})
"""Kinds of infrastructure failure that the task does not cause."""


def dispatched(state: SchedulerState, event: events.Dispatched, now: float) -> None:
    run = state.runs[event.run]
    worker = state.workers.named(event.worker, event.pool, now)
    worker.instance = event.instance or worker.instance
    deadline = now + run.spec.attempt_lease_s
    worker.term_s = min(worker.term_s, run.spec.attempt_lease_s)
    episodes = state.episodes
    unfit: list[str] = []
    for grant in event.grants:
        episode = episodes.get(grant.episode)
        if episode is None or episode.state != "queued":
            unfit.append(grant.episode)
            continue
        _lease(run, episode, grant, worker.name, event.version, now)
        episode.deadline = deadline
        worker.attempts[episode.id] = episode
    _trim_queues(run)
    if len(unfit) < len(event.grants):
        state.workers.watch(worker, deadline)
    if unfit:
        raise InternalError(f"Dispatched grants episodes that are not queued here: {', '.join(unfit)}.")


def _lease(run: Run, episode: Episode, grant: events.Grant, worker: str, version: Version, now: float) -> None:
    episode.move("leased", "Dispatched")
    episode.attempt = grant.attempt
    episode.nonce = grant.nonce
    episode.worker = worker
    episode.version = version
    episode.begun = False
    group = episode.group
    if group.dispatch_order < 0:
        assign_dispatch_order(run, group, now)
    if group.evaluation is None:
        run.queued -= 1
        run.leased += 1
    else:
        run.evaluation_queued -= 1
        run.evaluation_leased += 1


def _trim_queues(run: Run) -> None:
    """Drop entries that are not queued any more. They are at the head of a queue, unless an episode ended while it was
    queued, or its dispatch was lost in the log."""
    for queue, queued in ((run.queue, run.queued), (run.evaluation_queue, run.evaluation_queued)):
        while queue and queue[0].state != "queued":
            queue.popleft()
        if len(queue) > queued:
            queued_episodes = [episode for episode in queue if episode.state == "queued"]
            queue.clear()
            queue.extend(queued_episodes)


def attempt_ended(state: SchedulerState, event: events.AttemptEnded, now: float) -> None:
    episode = state.episodes[event.episode]
    run = state.runs[event.run]
    episode.require_move("queued", event.reason)
    worker = state.holder_of(episode)
    worker.attempts.pop(episode.id, None)
    episode.move("queued", event.reason)
    if event.reason == events.WORKER_LOST:
        episode.workers_lost += 1
        run.lost_attempts.append(LostAttempt(now, worker.process, episode.group.task.environment))
    if event.counts:
        episode.retries_used += 1
        run.recent_failures.append(event.failure)
        if event.failure is None:
            _count_kill(run, episode, f"{event.reason} at worker {episode.worker}")
        else:
            _add_to_streak(run, episode, event.failure)
    if episode.group.evaluation is None:
        run.leased -= 1
        run.queued += 1
        run.queue.appendleft(episode)
    else:
        run.evaluation_leased -= 1
        run.evaluation_queued += 1
        run.evaluation_queue.appendleft(episode)
    review(run, episode.group)


def attempt_cancelled(state: SchedulerState, event: events.AttemptCancelled, now: float) -> None:
    episode = state.episodes[event.episode]
    run = state.runs[event.run]
    episode.require_move("cancelling", event.reason)
    group = episode.group
    if event.reason == events.PARTIAL and group.state == "open":
        if not group.cut:
            cut(run, group)
    elif group.state != "retired":
        retire(run, group, event.reason)
    episode.move("cancelling", event.reason)
    episode.deadline = now + run.spec.attempt_lease_s
    state.workers.watch(state.holder_of(episode), episode.deadline)
    review(run, group)


def episode_ended(state: SchedulerState, event: events.EpisodeEnded, now: float) -> None:
    episode = state.episodes[event.episode]
    run, group, before = state.runs[event.run], episode.group, episode.state
    usable = event.is_usable
    holder = state.holder_of(episode) if before in AT_WORKER else None
    episode.end(event)
    if holder is not None:
        holder.attempts.pop(episode.id, None)
    if group.dispatch_order < 0:
        assign_dispatch_order(run, group, now)
    count_ended(run, group, before)
    if event.status == "failed":
        _count_failure(run, episode, event.failure)
    elif event.status != "cancelled":
        run.recent_failures.append(None)
        if run.failure_streak.attempts:
            run.failure_streak.end()
    if group.evaluation is not None:
        group.evaluation.add_result(event)
    else:
        run.episode_ends[event.status] += 1
        newest = event.low if event.high is None else event.high
        if newest is not None and episode.version is not None:
            run.policy_servers.take_result(event.servers or (IN_PROCESS,), episode.version, newest)
        if usable:
            run.rewards.append(sum(event.rewards.values()))
        elif event.is_rowless:
            run.count_rowless(event)
    if group.state == "retired":
        review(run, group)
    else:
        _add_result(run, group, event, usable)
        run.set_cut_deadline(group, now)


def _add_result(run: Run, group: Group, event: events.EpisodeEnded, usable: bool) -> None:
    """Add the result of a member to a group in flight."""
    is_other = event.first_prompt != group.first_prompt and group.evaluation is None
    if is_other and group.compare_prompt(event.first_prompt):
        run.count_prompts_differ(group.task.environment)
    if usable:
        group.usable += 1
        group.row_tokens += event.row_tokens
        group.longest_row = max(group.longest_row, event.longest_row)
    elif event.is_rowless:
        group.rowless += 1
    if group.evaluation is None:
        group.held_bytes += event.size_bytes
        run.ledger.held_bytes += event.size_bytes
        run.ledger.unfinished -= 1
        if event.by_worker:
            run.ledger.learn_size(event.size_bytes)
    is_plain = group.live and usable and not group.rowless and _is_in_bound(run, event)
    if not is_plain or group.prompts_differ or run.is_too_long(group):
        review(run, group)


def _is_in_bound(run: Run, event: events.EpisodeEnded) -> bool:
    """True if the result alone cannot make its group stale; most results then need no review of the group."""
    now, low = run.versions.now, event.low
    if low is None or low.lineage != now.lineage or now.n - low.n > run.spec.max_staleness:
        return False
    return event.high is None or event.high.lineage == now.lineage


def _count_failure(run: Run, episode: Episode, failure: Failure | None) -> None:
    if failure is None:
        return
    if failure.kind not in UNCOUNTED_KINDS:
        run.recent_failures.append(failure)
        _add_to_streak(run, episode, failure)
        if _may_be_caused_by_task(failure):
            description = f"{failure.layer}/{failure.kind}: {failure.message}"
            _count_kill(run, episode, description, once=failure.kind == LEASE_EXPIRED)


def _may_be_caused_by_task(failure: Failure) -> bool:
    """True unless it is of an unreachable engine. A task may cause one that keeps responding wrongly."""
    return failure.layer != "policy" or failure.kind in BAD_RESPONSE_KINDS


def _add_to_streak(run: Run, episode: Episode, failure: Failure) -> None:
    run.failure_streak.add(task_key(episode.group.task) if _may_be_caused_by_task(failure) else None)
    episode.group.failed_attempts += 1


def _count_kill(run: Run, episode: Episode, description: str, *, once: bool = False) -> None:
    key = task_key(episode.group.task)
    if key not in run.kills:
        remember(run.kills, key, [], run.remembered_tasks)
    kills = run.kills[key]
    if once and any(line.endswith(description) for line in kills):
        return  # one worker was lost with several episodes of the task
    kills.append(f"episode {episode.id} attempt {episode.attempt}: {description}")


def task_quarantined(state: SchedulerState, event: events.TaskQuarantined, now: float) -> None:
    run, key = state.runs[event.run], task_key(event.task)
    remember(run.quarantined, key, event.task, run.remembered_tasks)
    for position in [position for position in run.returned if _key_at(run, position) == key]:
        del run.returned[position]
    for group in list(run.open_groups.values()):
        if task_key(group.task) == key:
            drop_undispatched(run, group, "TaskQuarantined")
            review(run, group)


def _key_at(run: Run, position: int) -> bytes | None:
    found = run.source.next_task(position, ())
    return None if found is None else task_key(found[1])


def worker_draining(state: SchedulerState, event: events.WorkerDraining, now: float) -> None:
    if event.key:
        remember(state.workers.drain_keys, event.key, event.worker)
    if event.over:
        state.workers.draining.discard(event.worker)
    else:
        state.workers.draining.add(event.worker)
        # Known from now on, so that its end is noticed.
        state.workers.named(event.worker, "default", now)


TRANSITIONS: dict[type[events.Event], Callable[..., None]] = {
    events.Dispatched: dispatched,
    events.AttemptEnded: attempt_ended,
    events.AttemptCancelled: attempt_cancelled,
    events.EpisodeEnded: episode_ended,
    events.TaskQuarantined: task_quarantined,
    events.WorkerDraining: worker_draining,
}

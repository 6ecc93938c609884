"""Transitions of batches and of the learner sessions that lease them.

* A group that only pulls by name may take is served once; the others as often as the run spec sets.
* A new batch proves that the one before it was dissolved.
* A lost batch definition costs only itself; its version stands, and its groups retire by events of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InternalError
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.group_progress import complete, count_ended, index, move
from headrace_orchestrator.scheduler.state.batches import EARLIER_SESSIONS, SHARDED_PULLS, LearnerSessions, OpenBatch
from headrace_orchestrator.scheduler.state.groups import TERMINAL, Episode, Group
from headrace_orchestrator.scheduler.state.run import Run, remember
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def batch_formed(state: SchedulerState, event: events.BatchFormed, now: float) -> None:
    run = state.runs[event.run]
    groups = [run.groups[id] for id in event.groups]
    for group in groups:
        if group.state not in ("open", "eligible", "leased"):
            raise InternalError(f"Batch {event.batch} takes group {group.id}, which is {group.state}.")
    lost: list[Episode] = []
    for group in groups:
        if group.state == "open":
            lost += _end_lost_members(run, group)
        elif group.state == "leased":
            end_batch_of(run, group, "its groups are in another batch")
    for group in groups:
        _count_selected(run, group, event.filtered)
        run.undecided.pop(group.id, None)
        run.index_of(group).remove(group)
        move(run, group, "leased", "BatchFormed")
        group.batch = event.batch
    run.batches[event.batch] = OpenBatch(event.batch, groups, event.version)
    run.batches_formed += 1
    run.stale_since_batch = run.too_long_since_batch = 0
    run.rowless_since_batch.clear()
    run.prompts_differ_since_batch.clear()
    if run.is_for_any_pull(groups[0]):
        run.zero_variance_since_batch = run.zero_variance_tokens = 0
    for episode in lost:
        if episode.attempt:
            state.holder_of(episode).attempts.pop(episode.id, None)


def _count_selected(run: Run, group: Group, filtered: bool) -> None:
    run.selected[run.spec.selection.order if run.is_for_any_pull(group) else "awaited"] += 1
    if filtered:
        run.selected["filtered"] += 1
    if group.uses:
        run.selected["reused"] += 1
    if group.usable < group.size:
        run.selected["short"] += 1
    if group.cut:
        run.selected["partial"] += 1


def _end_lost_members(run: Run, group: Group) -> list[Episode]:
    """Complete an open group that a batch was formed of: the results of its live members were lost in the log."""
    lost = [episode for episode in group.members if episode.state not in TERMINAL]
    for episode in lost:
        episode.require_move("failed", "its record was lost")
        count_ended(run, group, episode.state)
        run.ledger.unfinished -= 1
        episode.move("failed", "its record was lost")
    group.damaged = True
    run.undecided.pop(group.id, None)
    complete(run, group)
    return lost


def batch_leased(state: SchedulerState, event: events.BatchLeased, now: float) -> None:
    run = state.runs[event.run]
    batch = run.batches[event.batch]
    batch.lease(event)
    sessions = _start_session(run, event.learner, event.session)
    if event.shards > 1:
        remember(sessions.pulls, event.request, event.batch, SHARDED_PULLS)
    batch.deadline = now + run.spec.batch_lease_s


def session_started(state: SchedulerState, event: events.SessionStarted, now: float) -> None:
    _start_session(state.runs[event.run], event.learner, event.session)


def _start_session(run: Run, learner: str, session: str) -> LearnerSessions:
    """The learner's sessions, with this one as the current one."""
    sessions = run.sessions.get(learner)
    if sessions is None or sessions.current != session:
        earlier = [] if sessions is None else [*sessions.earlier, sessions.current][-EARLIER_SESSIONS:]
        sessions = LearnerSessions(session, earlier)
        remember(run.sessions, learner, sessions)
    return sessions


def shard_fetched(state: SchedulerState, event: events.ShardFetched, now: float) -> None:
    run = state.runs[event.run]
    batch = run.batches[event.batch]
    batch.fetch(event.generation, event.shard)
    batch.deadline = now + run.spec.batch_lease_s


def batch_released(state: SchedulerState, event: events.BatchReleased, now: float) -> None:
    batch = state.runs[event.run].batches[event.batch]
    batch.generation = max(batch.generation, event.generation)  # its lease may be lost in the log
    batch.release(event.reason, lapsed=event.reason == events.EXPIRED)


def batch_dissolved(state: SchedulerState, event: events.BatchDissolved, now: float) -> None:
    run = state.runs[event.run]
    _dissolve(run, run.batches[event.batch], event.reason, unseen=event.unseen)


def _dissolve(run: Run, batch: OpenBatch, reason: str, *, unseen: bool = False) -> None:
    del run.batches[batch.id]
    remember(run.closed_batches, batch.id, batch.close("dissolved", reason=reason))
    if unseen and batch.learner in run.sessions:
        run.sessions[batch.learner].pulls.pop(batch.request, None)
    for group in batch.groups:
        _return_to_index(run, group, "BatchDissolved")


def batch_acked(state: SchedulerState, event: events.BatchAcked, now: float) -> None:
    run = state.runs[event.run]
    if event.version is not None:
        run.announce(event.version, None, event.weights)
    batch = run.batches.get(event.batch)
    if batch is not None:  # else its definition was lost in the log
        _ack(run, batch, str(event.version) if event.version is not None else "")


def _ack(run: Run, batch: OpenBatch, version: str = "") -> None:
    del run.batches[batch.id]
    remember(run.closed_batches, batch.id, batch.close("acked", version))
    run.batches_acked += 1
    for group in batch.groups:
        group.uses += 1
        if group.uses == 1:
            run.shares.count_trained(group.task)
        if group.uses < run.spec.max_uses and run.is_for_any_pull(group):
            # It keeps its place in the order of dispatch: at the tail it would go stale before its turn.
            _return_to_index(run, group, "BatchAcked")
        else:
            group.batch = ""
            move(run, group, "acked", "BatchAcked")
            run.undecided[group.id] = group


def _return_to_index(run: Run, group: Group, cause: str) -> None:
    """Make a group of a batch that is over eligible again; one of which all results were lost is not served again."""
    group.batch = ""
    move(run, group, "eligible", cause)
    index(run, group)
    if not group.usable:
        run.undecided[group.id] = group


def end_batch_of(run: Run, group: Group, reason: str) -> None:
    """End the batch of a group that is over, where the event that ended it was lost in the log."""
    batch = run.batches[group.batch]
    if reason == "acked":
        _ack(run, batch)
    else:
        _dissolve(run, batch, reason)


TRANSITIONS: dict[type[events.Event], Callable[..., None]] = {
    events.BatchFormed: batch_formed,
    events.BatchLeased: batch_leased,
    events.SessionStarted: session_started,
    events.ShardFetched: shard_fetched,
    events.BatchReleased: batch_released,
    events.BatchDissolved: batch_dissolved,
    events.BatchAcked: batch_acked,
}

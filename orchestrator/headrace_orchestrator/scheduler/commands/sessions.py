"""Learners: their current sessions and their activities.

* An earlier session of a learner is refused once a newer one took its place.
* Batches that another session of the learner left open are released.
* A learner that closed its client is gone at once; its leases run out.
"""

from __future__ import annotations

from headrace.errors import InvalidRequest, SessionSuperseded
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.state.batches import OpenBatch
from headrace_orchestrator.scheduler.state.run import LearnerActivity, Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MAX_SHARDS = 4096
"""Maximum number of ranks of a learner; more are taken for a mistake."""


def require_session(run: Run, learner: str, session: str, shard: int, shards: int) -> None:
    """Raise SessionSuperseded for an earlier session of the learner, InvalidRequest for an impossible shard."""
    if not 0 <= shard < shards <= MAX_SHARDS:
        raise InvalidRequest(
            f"Shard {shard} of {shards} does not exist.", hint=f"Shards count from 0; there are 1 to {MAX_SHARDS}."
        )
    sessions = run.sessions.get(learner)
    if sessions is not None and session != sessions.current and session in sessions.earlier:
        raise SessionSuperseded(
            f"Session {session!r} of learner {learner!r} is over: session {sessions.current!r} took over its batches.",
            hint="If this process is not a leftover, two learners run under one name: give each its own, as in "
            "Client(learner='a').",
        )


def release_other_sessions(state: SchedulerState, run: Run, learner: str, session: str, now: float) -> None:
    """Release the batches that other sessions of the learner hold."""
    for batch in run.batches.values():
        if batch.learner == learner and batch.session != session and (batch.leased or batch.lapsed):
            release(state, run, batch, "its learner has a new session", now)


def release(state: SchedulerState, run: Run, batch: OpenBatch, reason: str, now: float) -> None:
    """End a batch lease unacked."""
    released = events.BatchReleased(run=run.name, batch=batch.id, generation=batch.generation, reason=reason)
    emit(state, released, now)


def activity_of(run: Run, learner: str, now: float) -> LearnerActivity:
    """The activity of a learner that sent a request."""
    activity = run.learners.get(learner)
    if activity is None:
        activity = run.learners[learner] = LearnerActivity(now)
    activity.heard_at = now
    return activity


def end_wait(run: Run, learner: str, now: float) -> None:
    """Note that the connection of a learner's waiting pull ended."""
    activity = run.learners.get(learner)
    if activity is not None and activity.waiting_until > now:
        activity.waiting_until = 0.0
        activity.begin("idle", now)


def doing(state: SchedulerState, run: Run, request: messages.DoingRequest, now: float) -> None:
    """Record a learner's report of its activity, and renew all its batch leases, unless it says goodbye."""
    activity = activity_of(run, request.learner, now)
    activity.heartbeat_s = request.heartbeat_s
    if request.doing == "gone":
        activity.waiting_until = 0.0
        activity.begin("gone", now)
        return
    is_waiting = request.renewal and activity.waiting_until > now
    if not is_waiting and not (request.renewal and request.doing == activity.doing):
        activity.begin(request.doing, now)
    for batch in run.batches.values():
        if batch.leased and (batch.learner, batch.session) == (request.learner, request.session):
            batch.deadline = now + run.spec.batch_lease_s

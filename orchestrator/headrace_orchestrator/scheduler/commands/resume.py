"""Resume: the batches that a restarted learner gets back.

* It gets exactly the batches that its earlier sessions leased and never acked, as long as they are within bound.
* The reply names the others, with the reason why it cannot get them.
* Batches that it nacked are not among them.
* From then on requests of earlier sessions are refused, so that a late one takes no batch.
* A repeated request of the same session gets the same reply, without batches that were acked meanwhile.
"""

from __future__ import annotations

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.commands.batches import dissolve_if_out_of_bound
from headrace_orchestrator.scheduler.commands.pulls import lease
from headrace_orchestrator.scheduler.commands.sessions import activity_of, release_other_sessions, require_session
from headrace_orchestrator.scheduler.state.batches import OpenBatch
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

RESUMED = "resumed"
"""Request id in the leases of resumed batches, which no pull requested."""


def resume(state: SchedulerState, run: Run, request: messages.ResumeRequest, now: float) -> messages.ResumeReply:
    """Lease to this session the batches that the learner's earlier ones left. Raises SessionSuperseded,
    InvalidRequest."""
    require_session(run, request.learner, request.session, 0, request.shards)
    activity_of(run, request.learner, now)
    sessions = run.sessions.get(request.learner)
    if sessions is not None and sessions.current != request.session:
        started = events.SessionStarted(run=run.name, learner=request.learner, session=request.session)
        emit(state, started, now)
    release_other_sessions(state, run, request.learner, request.session, now)
    served = [batch.id for batch in run.batches.values() if _was_resumed(batch, request)]
    remaining = [batch for batch in run.batches.values() if batch.learner == request.learner and _was_left(batch)]
    for batch in remaining:
        if not run.closed and not dissolve_if_out_of_bound(state, run, batch, now):
            pull = messages.PullRequest(
                learner=request.learner, session=request.session, request=RESUMED, shards=request.shards
            )
            lease(state, run, batch, pull, now, fetched=())
            served.append(batch.id)
    follow_ups.settle(state, run, now)
    return messages.ResumeReply(epoch=state.epoch, batches=served, lost=_lost(run, request))


def _was_resumed(batch: OpenBatch, request: messages.ResumeRequest) -> bool:
    """True if an earlier reply gave the batch to this session."""
    held = batch.leased and (batch.learner, batch.session) == (request.learner, request.session)
    return held and batch.request == RESUMED


def _was_left(batch: OpenBatch) -> bool:
    return not batch.leased and not batch.given_back


def _lost(run: Run, request: messages.ResumeRequest) -> dict[str, str]:
    """Batches of earlier sessions that are over, or that another learner took."""
    lost: dict[str, str] = {}
    for id, closed in run.closed_batches.items():
        if closed.end == "dissolved" and closed.learner == request.learner and closed.session != request.session:
            lost[id] = closed.reason
        elif closed.before == request.learner != closed.learner:
            lost[id] = f"acked by learner {closed.learner!r}" if closed.end == "acked" else closed.reason
    for batch in run.batches.values():
        if batch.before == request.learner != batch.learner:
            lost[batch.id] = f"taken over by learner {batch.learner!r}"
    return lost

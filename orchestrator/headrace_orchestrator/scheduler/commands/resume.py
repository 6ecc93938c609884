"""Resuming: what a learner that was started again gets back.

* It gets exactly the batches that its earlier sessions leased and never acked, as long as they are within bound.
* It is told the names of the others, and why nobody will get them from it.
* What it gave back itself is not among them.
* From then on nothing that an earlier session still asks for is answered, so that no batch comes to be its own.
* Asked again by the same session, the answer is the same, but for what was acked meanwhile.
"""

from __future__ import annotations

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands import batches as serving
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.batches import Batch
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

RESUMED = "resumed"
"""Stands for the name of a pull in the leases of resumed batches."""


def resume(state: SchedulerState, run: Run, request: messages.ResumeRequest, now: float) -> messages.ResumeReply:
    """Lease to this session what the learner's earlier ones left. Raises SessionSuperseded, InvalidRequest."""
    serving.require_session(run, request.learner, request.session, 0, request.shards)
    serving.meet(run, request.learner, now)
    sessions = run.sessions.get(request.learner)
    if sessions is not None and sessions.now != request.session:
        started = events.SessionStarted(run=run.name, learner=request.learner, session=request.session)
        state.emit(started, now)
    serving.release_other_sessions(state, run, request.learner, request.session, now)
    served = [batch.id for batch in run.batches.values() if _resumed(batch, request)]
    left = [batch for batch in run.batches.values() if batch.learner == request.learner and _left(batch)]
    for batch in left:
        if not run.closed and not serving.dissolve_if_out_of_bound(state, run, batch, now):
            pull = messages.PullRequest(
                learner=request.learner, session=request.session, request=RESUMED, shards=request.shards
            )
            serving.lease(state, run, batch, pull, now, fetched=())
            served.append(batch.id)
    follow_ups.settle(state, run, now)
    return messages.ResumeReply(epoch=state.epoch, batches=served, lost=_lost(run, request))


def _resumed(batch: Batch, request: messages.ResumeRequest) -> bool:
    """Whether this session has it from an answer before."""
    mine = batch.leased and (batch.learner, batch.session) == (request.learner, request.session)
    return mine and batch.request == RESUMED


def _left(batch: Batch) -> bool:
    return not batch.leased and not batch.given_back


def _lost(run: Run, request: messages.ResumeRequest) -> dict[str, str]:
    """Batches of earlier sessions that are over, or in other hands."""
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

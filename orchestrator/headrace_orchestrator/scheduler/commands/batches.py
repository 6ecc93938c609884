"""Ends of batch leases: ack, nack, expiry, dissolution.

* Until it is redelivered its holder may ack a batch whose lease ran out.
* An ack before every shard was fetched is refused, and the error names the missing shards.
* A repeated ack of the same session and generation gets the same answer; any other ack of a closed batch is refused.
* An ack of an older generation is always superseded, even one of the same session.
* A batch leased when its run was closed may still be acked; when its lease is over it is dissolved.
* A batch that was given up is dissolved in any lease state; its groups are eligible again.
"""

from __future__ import annotations

from headrace.errors import BatchAlreadyAcked, BatchSuperseded, InvalidRequest, ShardsNotFetched, UnknownBatch
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups, versions
from headrace_orchestrator.scheduler.commands.sessions import activity_of, release
from headrace_orchestrator.scheduler.queries.empty_reasons import name_shards
from headrace_orchestrator.scheduler.state.batches import NACKED, OpenBatch
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def dissolve_if_out_of_bound(state: SchedulerState, run: Run, batch: OpenBatch, now: float) -> bool:
    """Dissolve an unleased batch that is out of bound, and retire its out-of-bound groups; returns True if it did."""
    reason = next(filter(None, map(run.bound_violation, batch.groups)), "")
    if not reason:
        return False
    emit(state, events.BatchDissolved(run=run.name, batch=batch.id, reason=reason), now)
    for group in batch.groups:
        if reason := run.bound_violation(group):
            follow_ups.retire(state, group, reason, now)
    return True


def ack(state: SchedulerState, run: Run, id: str, request: messages.AckRequest, now: float) -> messages.AckReply:
    """Ack a batch, and announce the version that the step made in the same event."""
    batch = run.batches.get(id)
    if batch is None:
        return _ack_closed(state, run, id, request)
    _require_lease(batch, request.learner, request.session, request.generation)
    _require_fetched(batch)
    version: Version | None = None
    if request.version:
        version = versions.parse_announced(run, request.version, request.weights)
    elif request.weights is not None:
        raise InvalidRequest(
            f"The ack of batch {id} has weights but names no version.", hint="Name the version that the step made."
        )
    acked = events.BatchAcked(
        run=run.name, batch=id, generation=request.generation, version=version, weights=request.weights
    )
    emit(state, acked, now)
    _note_end(run, request.learner, now)
    follow_ups.retire_out_of_bound(state, run, now)
    follow_ups.settle(state, run, now)
    return messages.AckReply(
        epoch=state.epoch,
        batch=id,
        version=str(run.versions.now),
        same_weights_as=versions.same_weights_as(run, version, request.weights),
    )


def _note_end(run: Run, learner: str, now: float) -> None:
    """Note that a learner holds a batch less: without one it does not train any more."""
    activity = activity_of(run, learner, now)
    holds = any(batch.leased and batch.learner == learner for batch in run.batches.values())
    if activity.doing == "training" and not holds:
        activity.begin("idle", now)


def _ack_closed(state: SchedulerState, run: Run, id: str, request: messages.AckRequest) -> messages.AckReply:
    closed = run.closed_batches.get(id)
    if closed is None:
        raise UnknownBatch(f"Run {run.name} has no batch {id!r}.")
    is_repeat = (closed.session, closed.generation) == (request.session, request.generation)
    if closed.end == "acked" and request.generation < closed.generation:
        raise BatchSuperseded(
            f"Batch {id} was acked in generation {closed.generation}; this was generation {request.generation}.",
            hint="Pull the next batch.",
        )
    if closed.end == "acked":
        if is_repeat and request.version in ("", closed.version):
            return messages.AckReply(epoch=state.epoch, batch=id, version=closed.version or str(run.versions.now))
        raise BatchAlreadyAcked(
            f"Batch {id} was acked by session {closed.session!r} in generation {closed.generation}.",
            hint="Pull the next batch.",
        )
    raise BatchSuperseded(
        f"Batch {id} was dissolved ({closed.reason}); it will not be served again.", hint="Pull the next batch."
    )


def _require_lease(batch: OpenBatch, learner: str, session: str, generation: int) -> None:
    is_holder = (batch.learner, batch.session, batch.generation) == (learner, session, generation)
    if is_holder and not (batch.leased or batch.lapsed):
        raise BatchSuperseded(
            f"The lease of batch {batch.id} is over: {batch.release_reason}.", hint="Pull again: it is served again."
        )
    if not is_holder:
        raise BatchSuperseded(
            f"Batch {batch.id} is in generation {batch.generation}, "
            f"{'held by' if batch.leased else 'last held by'} session {batch.session!r} of learner {batch.learner!r}; "
            f"this was generation {generation} of session {session!r}.",
            hint="Pull again: the batch is redelivered to the next pull.",
        )


def _require_fetched(batch: OpenBatch) -> None:
    if missing := batch.missing:
        raise ShardsNotFetched(
            f"Batch {batch.id} cannot be acked: {name_shards(missing, batch.shards)} not fetched.",
            hint="Every rank pulls its shard; ack when all have trained on theirs.",
            batch=batch.id,
            missing=missing,
        )


def nack(state: SchedulerState, run: Run, id: str, request: messages.NackRequest, now: float) -> None:
    """Release a batch that its holder gives back; it is redelivered whole while within bound."""
    batch = _open_batch(run, id)
    if batch is None:
        return
    _require_lease(batch, request.learner, request.session, request.generation)
    release(state, run, batch, f"{NACKED}{request.reason}", now)
    _note_end(run, request.learner, now)
    dissolve_if_out_of_bound(state, run, batch, now)
    follow_ups.settle(state, run, now)


def _open_batch(run: Run, id: str) -> OpenBatch | None:
    """The batch; None if it was already dissolved."""
    batch = run.batches.get(id)
    if batch is None:
        closed = run.closed_batches.get(id)
        if closed is None:
            raise UnknownBatch(f"Run {run.name} has no batch {id!r}.")
        if closed.end == "acked":
            raise BatchAlreadyAcked(f"Batch {id} was acked; it cannot be given back.", hint="Pull the next batch.")
    return batch


def dissolve(state: SchedulerState, run: Run, id: str, reason: str, now: float, answering: int) -> None:
    """Dissolve a batch that cannot be served; ``answering``: its pulls that are not answered yet. Raises UnknownBatch,
    BatchAlreadyAcked."""
    batch = _open_batch(run, id)
    if batch is not None:
        unseen = len(batch.fetched) <= answering
        emit(state, events.BatchDissolved(run=run.name, batch=id, reason=reason, unseen=unseen), now)
        follow_ups.retire_out_of_bound(state, run, now)
        follow_ups.settle(state, run, now)


def expire(state: SchedulerState, run: Run, now: float) -> None:
    """Release the batches whose leases ran out, and dissolve those out of bound."""
    expired = [batch for batch in run.batches.values() if batch.leased and batch.deadline <= now]
    for batch in expired:
        release(state, run, batch, events.EXPIRED, now)
        dissolve_if_out_of_bound(state, run, batch, now)
    if expired:
        follow_ups.settle(state, run, now)

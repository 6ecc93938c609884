"""Serving batches: pull, form, ack, nack, resume.

* The same request of a session is answered with the same batch; in the same generation, until that is acked.
* Batches that another session of the learner left open are released and served first; oldest first.
* A batch whose lease ran out is redelivered whole while within bound; else it is dissolved.
* Until it is redelivered its holder may ack a batch whose lease ran out.
* The same request of the ranks that share a session is answered with shards of one batch, under one lease.
* An ack before every shard was fetched is refused, and names those that are missing.
* A rank that comes late takes up the lease of its session; one that asks for a batch that is over is told so.
* An earlier session of a learner is told that a newer one took its place.
* A learner that resumes gets what its earlier sessions leased and never acked, and the names of what is lost.
* A repeated ack of the same session and generation gets the same answer; any other ack of a closed batch is refused.
* An ack of an older generation is always superseded, be it of the same session.
* A batch leased when its run was closed may still be acked; when its lease is over it is dissolved.
* A batch that was given up is dissolved in any lease state; its groups are eligible again.
* Only whole groups are served; ``selection`` chooses them.
* A pull may ask for some kinds of groups; pulls that ask for different ones, or for any, go on side by side.
* A batch is redelivered only to a pull that asks for nothing else than what it holds.
* A pull that names groups is served exactly these, once complete.
* A pull on an idle run admits one more group; unless the byte bound or a held batch blocks it.
"""

from __future__ import annotations

from headrace.batch.manifest import BatchSelection
from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    Conflict,
    InvalidRequest,
    SessionSuperseded,
    ShardsNotFetched,
    UnknownBatch,
    UnknownGroup,
)
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands import follow_ups, versions
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Plan, Redeliver
from headrace_orchestrator.scheduler.queries import empty_reasons, selection
from headrace_orchestrator.scheduler.state.batches import NACKED, Batch
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, Filter, kind_of
from headrace_orchestrator.scheduler.state.run import Learner, Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MIN_WAITING_S = 5.0
"""Seconds that a learner counts as waiting after an empty answer, if it did not say how long it waits."""

MAX_SHARDS = 4096
"""Ranks of the largest learner that is expected; more is a mistake."""


def pull(state: SchedulerState, run: Run, request: messages.PullRequest, now: float) -> Plan:
    """A batch, a plan to form one, or why there is none."""
    if request.groups is not None:
        _require_groups(run, request.groups)
    filter = _filter(run, request)
    require_session(run, request.learner, request.session, request.shard, request.shards)
    held = _held_by(run, request)
    learner = meet(run, request.learner, now)
    if request.groups is not None:
        _retire_out_of_bound(state, run, request.groups, now)
    release_other_sessions(state, run, request.learner, request.session, now)
    plan: Plan | None = _again(state, run, held, request, now) or _redeliver(state, run, request, filter, now)
    if plan is None:
        follow_ups.settle(state, run, now)  # dissolved batches may have left groups of which nothing can be served
        plan = _plan(state, run, request.groups, filter)
    if plan is None and request.groups is None:
        _admit_one_more(state, run, now)
    follow_ups.settle(state, run, now)
    if plan is not None:
        learner.waiting_until = 0.0
        return plan
    learner.waiting_until = now + max(request.wait_s, MIN_WAITING_S)
    reasons, finished = empty_reasons.empty(state, run, now, request.groups, filter)
    return messages.EmptyReply(epoch=state.epoch, reasons=reasons, finished=finished)


def meet(run: Run, name: str, now: float) -> Learner:
    learner = run.learners.get(name)
    if learner is None:
        learner = run.learners[name] = Learner()
    learner.doing = learner.doing or "waiting"
    learner.said_at = learner.said_at or now
    return learner


def _require_groups(run: Run, ids: list[str]) -> None:
    if not ids or len(set(ids)) < len(ids):
        raise InvalidRequest("A pull names each group that it awaits once, and at least one.")
    for id in ids:
        group = run.groups.get(id)
        if id not in run.submitted_ends and (group is None or not group.submitted):
            raise UnknownGroup(f"Run {run.name} has no submitted group {id!r}.", hint="Submit it first.")


def _filter(run: Run, request: messages.PullRequest) -> Filter:
    """What the pull asks for; raises InvalidRequest where no group could ever be that."""
    filter = Filter.of(request.environments, request.tags)
    if filter != EVERYTHING and request.groups is not None:
        raise InvalidRequest("A pull names the groups that it awaits, or says of which kind they are to be; not both.")
    if run.kinds is not None and not any(map(filter.fits, run.kinds)) and run.kinds:
        raise InvalidRequest(
            f"Run {run.name} has no task of {filter}; it would be waited for without end.",
            hint="The run spec lists its environments and tasks with their tags.",
        )
    return filter


def require_session(run: Run, learner: str, session: str, shard: int, shards: int) -> None:
    """Raises SessionSuperseded for an earlier session of the learner, InvalidRequest for a shard that cannot be."""
    if not 0 <= shard < shards <= MAX_SHARDS:
        raise InvalidRequest(
            f"There is no shard {shard} of {shards}.", hint=f"Shards count from 0; there are 1 to {MAX_SHARDS}."
        )
    sessions = run.sessions.get(learner)
    if sessions is not None and session != sessions.now and session in sessions.earlier:
        raise SessionSuperseded(
            f"Session {session!r} of learner {learner!r} is over: session {sessions.now!r} took over its batches.",
            hint="If this process is no leftover, two learners run under one name: give each its own, as in "
            "Client(learner='a').",
        )


def _retire_out_of_bound(state: SchedulerState, run: Run, ids: list[str], now: float) -> None:
    """Awaited groups that wait to be retired are not served in between."""
    for id in ids if run.retiring else ():
        group = run.groups.get(id)
        if group is not None and group.state in ("open", "eligible") and (reason := run.out_of_bound(group)):
            follow_ups.retire(state, group, reason, now)


def release_other_sessions(state: SchedulerState, run: Run, learner: str, session: str, now: float) -> None:
    for batch in run.batches.values():
        if batch.learner == learner and batch.session != session and (batch.leased or batch.lapsed):
            _release(state, run, batch, "its learner has a new session", now)


def _release(state: SchedulerState, run: Run, batch: Batch, reason: str, now: float) -> None:
    event = events.BatchReleased(run=run.name, batch=batch.id, generation=batch.generation, reason=reason)
    state.emit(event, now)


def _held_by(run: Run, request: messages.PullRequest) -> Batch | None:
    """The batch that this very request of the session holds. Raises BatchSuperseded where it is over, as for a rank
    that comes too late; InvalidRequest where the ranks disagree on their number."""
    named = (request.learner, request.session, request.request)
    for batch in run.batches.values():
        mine = (batch.learner, batch.session) == named[:2] and (batch.leased or (batch.lapsed and batch.shards > 1))
        if mine and (batch.id == request.batch if request.batch else batch.request == request.request):
            if batch.shards != request.shards:
                raise InvalidRequest(
                    f"Session {request.session!r} pulled batch {batch.id} in {batch.shards} shards; this pull asks for "
                    f"shard {request.shard} of {request.shards}.",
                    hint="All ranks give the same number of shards; with another number, start a new session.",
                )
            return batch
    over = request.batch
    sessions = run.sessions.get(request.learner)
    if not over and request.shards > 1 and sessions is not None and sessions.now == request.session:
        over = sessions.pulls.get(request.request, "")
    if over:
        raise BatchSuperseded(
            f"Batch {over} is not session {request.session!r}'s to fetch: it {_end_of(run, over)}.",
            hint="Pull on, as the other ranks do. A learner that was started again takes a new session.",
            batch=over,
        )
    return None


def _end_of(run: Run, id: str) -> str:
    """What became of a batch that a session held once."""
    batch, closed = run.batches.get(id), run.closed_batches.get(id)
    if batch is not None:
        return f"was released ({batch.released})" if not batch.leased else "is leased anew"
    if closed is None:
        return "is not known"
    return "was acked" if closed.end == "acked" else f"was dissolved ({closed.reason})"


def _again(
    state: SchedulerState, run: Run, batch: Batch | None, request: messages.PullRequest, now: float
) -> Redeliver | None:
    """What this very request holds already."""
    if batch is None:
        return None
    if batch.lapsed or request.shard not in batch.fetched:
        fetched = events.ShardFetched(run=run.name, batch=batch.id, generation=batch.generation, shard=request.shard)
        state.emit(fetched, now)
    batch.deadline = now + run.spec.batch_lease_s
    return Redeliver(batch.id, batch.generation, run.spec.batch_lease_s, request.shard, request.shards)


def _redeliver(
    state: SchedulerState, run: Run, request: messages.PullRequest, filter: Filter, now: float
) -> Redeliver | None:
    """The oldest batch that waits to be pulled again. On the way, those that are out of bound are dissolved."""
    wanted = None if request.groups is None else set(request.groups)
    for batch in list(run.batches.values()):
        if batch.leased or run.closed:
            continue
        if dissolve_if_out_of_bound(state, run, batch, now):
            continue
        ids = {group.id for group in batch.groups}
        if wanted is None:
            fits = run.plain(batch.groups[0]) and all(filter.fits(kind_of(group.task)) for group in batch.groups)
        else:
            fits = ids == wanted
            if not fits and ids & wanted:
                # Awaited groups must not hang in a batch that nobody pulls.
                state.emit(events.BatchDissolved(run=run.name, batch=batch.id, reason="its groups are awaited"), now)
        if fits:
            return lease(state, run, batch, request, now)
    return None


def lease(
    state: SchedulerState,
    run: Run,
    batch: Batch,
    request: messages.PullRequest,
    now: float,
    *,
    fetched: tuple[int, ...] | None = None,
) -> Redeliver:
    """Lease a released batch to whoever asks; ``fetched``: the shards that are served with it, default the one that
    was asked for."""
    state.emit(
        events.BatchLeased(
            run=run.name,
            batch=batch.id,
            generation=batch.generation + 1,
            learner=request.learner,
            session=request.session,
            request=request.request,
            shards=request.shards,
            fetched=(request.shard,) if fetched is None else fetched,
        ),
        now,
    )
    learner = run.learners[request.learner]
    learner.doing, learner.said_at = "training", now  # it may say otherwise
    return Redeliver(batch.id, batch.generation, run.spec.batch_lease_s, request.shard, request.shards)


def dissolve_if_out_of_bound(state: SchedulerState, run: Run, batch: Batch, now: float) -> bool:
    """Dissolve an unleased batch that is out of bound, and retire its groups that are; says whether it did."""
    reason = next(filter(None, map(run.out_of_bound, batch.groups)), "")
    if not reason:
        return False
    state.emit(events.BatchDissolved(run=run.name, batch=batch.id, reason=reason), now)
    for group in batch.groups:
        if reason := run.out_of_bound(group):
            follow_ups.retire(state, group, reason, now)
    return True


def _plan(state: SchedulerState, run: Run, awaited: list[str] | None, filter: Filter) -> Form | None:
    order: str = run.spec.selection.order
    if run.closed:
        return None  # what it leaves over is still to be retired
    if awaited is None:
        groups = selection.choose(run, filter)
    else:
        order = "awaited"
        groups = [run.groups[id] for id in awaited if id in run.groups]
        if len(groups) < len(awaited) or any(group.state != "eligible" for group in groups):
            return None
    if not groups:
        return None
    return Form(
        state.new_id(),
        run.versions.now,
        [(group.id, group.trajectories) for group in groups],
        BatchSelection(order=order, environments=sorted(filter.environments), tags=sorted(filter.tags)),
    )


def _admit_one_more(state: SchedulerState, run: Run, now: float) -> None:
    """An idle run that cannot fill a batch gets one group beyond its credit."""
    if run.closed or run.open or run.ledger.full or len(run.held_batches()) > run.spec.max_staleness:
        return
    follow_ups.admit(state, run, now)


def form(state: SchedulerState, run: Run, plan: Form, request: messages.PullRequest, now: float) -> Redeliver:
    """Freeze a planned batch and lease it. Raises Conflict where its groups are not eligible any more, the run has
    another version or was closed, SessionSuperseded where a newer session of the learner came meanwhile."""
    require_session(run, request.learner, request.session, request.shard, request.shards)
    if run.closed:
        raise Conflict(f"Run {run.name} was closed; the batch cannot be formed.", hint="Pull again: it says so.")
    if plan.version != run.versions.now:
        raise Conflict(
            f"The batch was planned at version {plan.version}; now it is {run.versions.now}.", hint="Pull again."
        )
    for id, _ in plan.groups:
        group = run.groups.get(id)
        if group is None or group.state != "eligible":
            raise Conflict(f"Group {id} is not eligible any more; the batch cannot be formed.", hint="Pull again.")
    ids = [id for id, _ in plan.groups]
    state.emit(
        events.BatchFormed(
            run=run.name,
            batch=plan.batch,
            groups=ids,
            version=plan.version,
            filtered=plan.selection.filtered,
        ),
        now,
    )
    leased = lease(state, run, run.batches[plan.batch], request, now)
    follow_ups.settle(state, run, now)
    return leased


def ack(state: SchedulerState, run: Run, id: str, request: messages.AckRequest, now: float) -> messages.AckReply:
    """Take an ack, and the version that the step made in the same record."""
    batch = run.batches.get(id)
    if batch is None:
        return _ack_closed(state, run, id, request)
    _require_lease(batch, request.learner, request.session, request.generation)
    _require_fetched(batch)
    version: Version | None = None
    if request.version:
        version = versions.checked(run, request.version, request.weights)
    elif request.weights is not None:
        raise InvalidRequest(
            f"The ack of batch {id} brings weights and names no version.", hint="Name the version that the step made."
        )
    state.emit(
        events.BatchAcked(
            run=run.name, batch=id, generation=request.generation, version=version, weights=request.weights
        ),
        now,
    )
    follow_ups.retire_out_of_bound(state, run, now)
    follow_ups.settle(state, run, now)
    return messages.AckReply(epoch=state.epoch, batch=id, version=str(run.versions.now))


def _ack_closed(state: SchedulerState, run: Run, id: str, request: messages.AckRequest) -> messages.AckReply:
    closed = run.closed_batches.get(id)
    if closed is None:
        raise UnknownBatch(f"Run {run.name} has no batch {id!r}.")
    same = (closed.session, closed.generation) == (request.session, request.generation)
    if closed.end == "acked" and request.generation < closed.generation:
        raise BatchSuperseded(
            f"Batch {id} was acked in generation {closed.generation}; this was generation {request.generation}.",
            hint="Pull the next batch.",
        )
    if closed.end == "acked":
        if same and request.version in ("", closed.version):
            return messages.AckReply(epoch=state.epoch, batch=id, version=closed.version or str(run.versions.now))
        raise BatchAlreadyAcked(
            f"Batch {id} was acked by session {closed.session!r} in generation {closed.generation}.",
            hint="Pull the next batch.",
        )
    raise BatchSuperseded(
        f"Batch {id} was dissolved ({closed.reason}); it will not be served again.", hint="Pull the next batch."
    )


def _require_lease(batch: Batch, learner: str, session: str, generation: int) -> None:
    mine = (batch.learner, batch.session, batch.generation) == (learner, session, generation)
    if mine and not (batch.leased or batch.lapsed):
        raise BatchSuperseded(
            f"The lease of batch {batch.id} is over: {batch.released}.", hint="Pull again: it is served again."
        )
    if not mine:
        raise BatchSuperseded(
            f"Batch {batch.id} is in generation {batch.generation}, "
            f"{'held by' if batch.leased else 'last held by'} session {batch.session!r} of learner {batch.learner!r}; "
            f"this was generation {generation} of session {session!r}.",
            hint="Pull again: the batch is redelivered to whoever pulls.",
        )


def _require_fetched(batch: Batch) -> None:
    if missing := batch.missing:
        raise ShardsNotFetched(
            f"Batch {batch.id} cannot be acked: {empty_reasons.shards(missing, batch.shards)} not fetched.",
            hint="Every rank pulls its shard; ack when all have trained on theirs.",
            batch=batch.id,
            missing=missing,
        )


def nack(state: SchedulerState, run: Run, id: str, request: messages.NackRequest, now: float) -> None:
    """Take a batch back; it is redelivered whole while within bound."""
    batch = _open_batch(run, id)
    if batch is None:
        return
    _require_lease(batch, request.learner, request.session, request.generation)
    _release(state, run, batch, f"{NACKED}{request.reason}", now)
    dissolve_if_out_of_bound(state, run, batch, now)
    follow_ups.settle(state, run, now)


def _open_batch(run: Run, id: str) -> Batch | None:
    """The batch; None where it was dissolved already."""
    batch = run.batches.get(id)
    if batch is None:
        closed = run.closed_batches.get(id)
        if closed is None:
            raise UnknownBatch(f"Run {run.name} has no batch {id!r}.")
        if closed.end == "acked":
            raise BatchAlreadyAcked(f"Batch {id} was acked; it cannot be given back.", hint="Pull the next batch.")
    return batch


def dissolve(state: SchedulerState, run: Run, id: str, reason: str, now: float, answering: int) -> None:
    """Give a batch up; raises UnknownBatch, or BatchAlreadyAcked."""
    batch = _open_batch(run, id)
    if batch is not None:
        unseen = len(batch.fetched) <= answering
        state.emit(events.BatchDissolved(run=run.name, batch=id, reason=reason, unseen=unseen), now)
        follow_ups.retire_out_of_bound(state, run, now)
        follow_ups.settle(state, run, now)


def doing(state: SchedulerState, run: Run, request: messages.DoingRequest, now: float) -> None:
    """A learner says what it is doing: all its batch leases are renewed."""
    learner = meet(run, request.learner, now)
    learner.doing = request.doing
    learner.said_at = now
    for batch in run.batches.values():
        if batch.leased and (batch.learner, batch.session) == (request.learner, request.session):
            batch.deadline = now + run.spec.batch_lease_s


def expire(state: SchedulerState, run: Run, now: float) -> None:
    """Release the batches whose leases ran out, and dissolve those out of bound."""
    late = [batch for batch in run.batches.values() if batch.leased and batch.deadline <= now]
    for batch in late:
        _release(state, run, batch, events.EXPIRED, now)
        dissolve_if_out_of_bound(state, run, batch, now)
    if late:
        follow_ups.settle(state, run, now)

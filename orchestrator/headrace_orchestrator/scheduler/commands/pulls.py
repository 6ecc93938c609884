"""Pulls: serve a batch again, or plan and form a new one.

* The same request of a session is answered with the same batch, in the same generation, until that is acked.
* Batches that another session of the learner left open are released and served first; oldest first.
* A batch whose lease ran out is redelivered whole while within bound; else it is dissolved.
* The same request of the ranks that share a session is answered with shards of one batch, under one lease.
* A late rank renews the lease of its session; one that requests a batch that is over gets an error.
* Only whole groups are served, oldest dispatch first unless the run selects them in another order.
* A pull may ask for some kinds of groups; pulls that ask for different kinds, or for any, proceed side by side.
* A batch is redelivered only to a pull whose filter or groups it fits.
* A pull that names groups is served exactly these, once complete.
* A pull on an idle run admits one more group, unless the byte bound or a held batch blocks it.
* A selection rule that fails ends the pull with SelectionRuleFailed, and leaves the groups eligible.
"""

from __future__ import annotations

from headrace.batch.manifest import BatchSelection
from headrace.errors import BatchSuperseded, Conflict, InvalidRequest, SelectionRuleFailed, UnknownGroup
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.commands.batches import dissolve_if_out_of_bound
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Plan, Redeliver
from headrace_orchestrator.scheduler.commands.sessions import activity_of, release_other_sessions, require_session
from headrace_orchestrator.scheduler.queries import empty_reasons, selection
from headrace_orchestrator.scheduler.state.batches import OpenBatch
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter, kind_of
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MIN_WAITING_S = 5.0
"""Seconds that a learner counts as waiting after an empty reply, unless its request waits longer."""


def pull(state: SchedulerState, run: Run, request: messages.PullRequest, now: float) -> Plan:
    """A batch, a plan to form one, or the reasons of an empty reply."""
    if request.groups is not None:
        _require_groups(run, request.groups)
    filter = _filter(run, request)
    require_session(run, request.learner, request.session, request.shard, request.shards)
    held = _held_batch(run, request)
    learner = activity_of(run, request.learner, now)
    learner.heartbeat_s = request.heartbeat_s
    if request.groups is not None:
        _retire_out_of_bound(state, run, request.groups, now)
    release_other_sessions(state, run, request.learner, request.session, now)
    plan: Plan | None = _serve_held(state, run, held, request, now) or _redeliver(state, run, request, filter, now)
    if plan is None:
        follow_ups.settle(state, run, now)  # a dissolved batch may leave groups without usable results
        plan = _plan(state, run, request.groups, filter)
    if plan is None and request.groups is None:
        _admit_one_more(state, run, now)
    follow_ups.settle(state, run, now)
    if plan is not None:
        learner.waiting_until = 0.0
        return plan
    learner.waiting_until = now + max(request.wait_s, MIN_WAITING_S)
    if learner.doing != "waiting":
        learner.begin("waiting", now)
    reasons, finished = empty_reasons.empty_reasons(state, run, now, request.groups, filter)
    return messages.EmptyReply(epoch=state.epoch, reasons=reasons, finished=finished)


def _require_groups(run: Run, ids: list[str]) -> None:
    if not ids or len(set(ids)) < len(ids):
        raise InvalidRequest("A pull that awaits groups must name at least one, and each only once.")
    for id in ids:
        group = run.groups.get(id)
        if id not in run.submitted_ends and (group is None or not group.submitted):
            raise UnknownGroup(f"Run {run.name} has no submitted group {id!r}.", hint="Submit it first.")


def _filter(run: Run, request: messages.PullRequest) -> GroupFilter:
    """The filter of a pull; raises InvalidRequest if no group can ever fit it."""
    filter = GroupFilter.of(request.environments, request.tags)
    if filter != EVERYTHING and request.groups is not None:
        raise InvalidRequest("A pull may name groups or kinds of groups, not both.")
    if run.task_kinds is not None and not any(map(filter.fits, run.task_kinds)) and run.task_kinds:
        raise InvalidRequest(
            f"Run {run.name} has no task of {filter}; the pull would wait forever.",
            hint="The run spec lists its environments and tasks with their tags.",
        )
    return filter


def _retire_out_of_bound(state: SchedulerState, run: Run, ids: list[str], now: float) -> None:
    """Retire awaited groups that wait for the next slice of retirements, so that they are not served before it."""
    for id in ids if run.retiring else ():
        group = run.groups.get(id)
        if group is not None and group.state in ("open", "eligible") and (reason := run.bound_violation(group)):
            follow_ups.retire(state, group, reason, now)


def _held_batch(run: Run, request: messages.PullRequest) -> OpenBatch | None:
    """The batch that the session already holds for this request. Raises BatchSuperseded if that batch is over, as for a
    rank that comes too late; InvalidRequest if the ranks disagree on their number."""
    holder = (request.learner, request.session)
    for batch in run.batches.values():
        is_held = (batch.learner, batch.session) == holder and (batch.leased or (batch.lapsed and batch.shards > 1))
        if is_held and (batch.id == request.batch if request.batch else batch.request == request.request):
            if batch.shards != request.shards:
                raise InvalidRequest(
                    f"Session {request.session!r} pulled batch {batch.id} in {batch.shards} shards; this pull is for "
                    f"shard {request.shard} of {request.shards}.",
                    hint="All ranks give the same number of shards; with another number, start a new session.",
                )
            return batch
    over = request.batch
    sessions = run.sessions.get(request.learner)
    if not over and request.shards > 1 and sessions is not None and sessions.current == request.session:
        over = sessions.pulls.get(request.request, "")
    if over:
        raise BatchSuperseded(
            f"Session {request.session!r} cannot fetch batch {over}: it {_end_of(run, over)}.",
            hint="Keep pulling, as the other ranks do. A restarted learner uses a new session.",
            batch=over,
        )
    return None


def _end_of(run: Run, id: str) -> str:
    """The end of a batch that a session once held, as the predicate of a sentence."""
    batch, closed = run.batches.get(id), run.closed_batches.get(id)
    if batch is not None:
        return f"was released ({batch.release_reason})" if not batch.leased else "was leased again"
    if closed is None:
        return "is unknown"
    return "was acked" if closed.end == "acked" else f"was dissolved ({closed.reason})"


def _serve_held(
    state: SchedulerState, run: Run, batch: OpenBatch | None, request: messages.PullRequest, now: float
) -> Redeliver | None:
    """Serve the batch that the session already holds for this request, and renew its lease."""
    if batch is None:
        return None
    if batch.lapsed or request.shard not in batch.fetched:
        fetched = events.ShardFetched(run=run.name, batch=batch.id, generation=batch.generation, shard=request.shard)
        emit(state, fetched, now)
    batch.deadline = now + run.spec.batch_lease_s
    return Redeliver(batch.id, batch.generation, run.spec.batch_lease_s, request.shard, request.shards)


def _redeliver(
    state: SchedulerState, run: Run, request: messages.PullRequest, filter: GroupFilter, now: float
) -> Redeliver | None:
    """Lease the oldest batch that waits to be pulled again, and dissolve those before it that are out of bound."""
    awaited = None if request.groups is None else set(request.groups)
    for batch in list(run.batches.values()):
        if batch.leased or run.closed:
            continue
        if dissolve_if_out_of_bound(state, run, batch, now):
            continue
        ids = {group.id for group in batch.groups}
        if awaited is None:
            fits = run.is_for_any_pull(batch.groups[0]) and all(
                filter.fits(kind_of(group.task)) for group in batch.groups
            )
        else:
            fits = ids == awaited
            if not fits and ids & awaited:
                # Awaited groups must not stay in a batch that no learner pulls.
                emit(state, events.BatchDissolved(run=run.name, batch=batch.id, reason="its groups are awaited"), now)
        if fits:
            return lease(state, run, batch, request, now)
    return None


def lease(
    state: SchedulerState,
    run: Run,
    batch: OpenBatch,
    request: messages.PullRequest,
    now: float,
    *,
    fetched: tuple[int, ...] | None = None,
) -> Redeliver:
    """Lease a released batch to the requesting session. ``fetched``: the shards that are served with it, by default the
    requested one."""
    leased = events.BatchLeased(
        run=run.name,
        batch=batch.id,
        generation=batch.generation + 1,
        learner=request.learner,
        session=request.session,
        request=request.request,
        shards=request.shards,
        fetched=(request.shard,) if fetched is None else fetched,
    )
    emit(state, leased, now)
    learner = run.learners[request.learner]
    learner.begin("training", now)  # until it reports otherwise
    return Redeliver(batch.id, batch.generation, run.spec.batch_lease_s, request.shard, request.shards)


def _plan(state: SchedulerState, run: Run, awaited: list[str] | None, filter: GroupFilter) -> Form | None:
    order: str = run.spec.selection.order
    if run.closed:
        return None  # its remaining groups wait to be retired
    if awaited is None:
        groups = _choose(run, filter)
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


def _choose(run: Run, filter: GroupFilter) -> list[Group]:
    """The groups that the run's rule chooses. Raises SelectionRuleFailed; the failure is a reason until it works."""
    try:
        groups = selection.choose(run, filter)
    except SelectionRuleFailed as error:
        run.selection_failure = str(error)
        raise
    if groups:
        run.selection_failure = ""
    return groups


def _admit_one_more(state: SchedulerState, run: Run, now: float) -> None:
    """Admit one group beyond the credit of an idle run that cannot fill a batch."""
    if run.closed or run.open or run.ledger.full or len(run.batches_for_any_pull()) > run.spec.max_staleness:
        return
    follow_ups.admit_next(state, run, now)


def form(state: SchedulerState, run: Run, plan: Form, request: messages.PullRequest, now: float) -> Redeliver:
    """Freeze a planned batch and lease it. Raises Conflict if its groups are not eligible any more, the run has
    another version or was closed, SessionSuperseded if the learner has a newer session."""
    require_session(run, request.learner, request.session, request.shard, request.shards)
    if run.closed:
        raise Conflict(f"Run {run.name} was closed; the batch cannot be formed.", hint="Pull again.")
    if plan.version != run.versions.now:
        raise Conflict(
            f"The batch was planned at version {plan.version}; now it is {run.versions.now}.", hint="Pull again."
        )
    ids = [id for id, _ in plan.groups]
    for id in ids:
        group = run.groups.get(id)
        if group is None or group.state != "eligible":
            raise Conflict(f"Group {id} is not eligible any more; the batch cannot be formed.", hint="Pull again.")
    formed = events.BatchFormed(
        run=run.name, batch=plan.batch, groups=ids, version=plan.version, filtered=plan.selection.filtered
    )
    emit(state, formed, now)
    leased = lease(state, run, run.batches[plan.batch], request, now)
    follow_ups.settle(state, run, now)
    return leased

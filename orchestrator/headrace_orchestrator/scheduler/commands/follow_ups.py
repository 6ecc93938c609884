"""Follow-up decisions after a change: top-ups, retirements, quarantine, cancellation, admission.

* Between commands no group waits for a decision and no credit lies idle; admission stays only slightly ahead of
  dispatch.
* One dead worker neither quarantines a task nor fails a group: its attempts are queued again and draw no budget. An
  attempt that a live worker began and dropped draws on the budget, and counts towards quarantine.
* An attempt that nobody began counts for nothing.
* A task that crashes its worker each time ends: an episode survives ten times ``max_attempts`` lost workers.
* Groups that a new version or a closed run leaves behind are retired in slices, and not served meanwhile.
* After a replay, changes that a cut log left unfinished are completed; settling depends on the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile

from headrace.errors import Conflict, UnknownGroup
from headrace.trajectory import Failure, PolicyRef, Status, Task
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.attempts import LEASE_EXPIRED
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.state.admission.adapter_assignment import assign_adapters
from headrace_orchestrator.scheduler.state.admission.task_sources import sampling_seed, task_key
from headrace_orchestrator.scheduler.state.groups import Episode, Group
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

SLICE = 64
"""Maximum number of groups that one command retires: a million would block all requests for half a minute."""


def settle(state: SchedulerState, run: Run, now: float) -> None:
    """Make all decisions that are due in a run, then admit as many groups as its credit allows."""
    if run.closed:
        stop_closed(state, run, now)
    while run.undecided:
        _decide(state, run, next(iter(run.undecided.values())), now)
    for evaluation in list(run.active_evaluations.values()):
        if not evaluation.left:
            reason = evaluation.end_reason(run.closed)
            emit(state, events.EvaluationEnded(run=run.name, evaluation=evaluation.id, reason=reason), now)
    admit_ahead(state, run, now)


def settle_after_replay(state: SchedulerState, now: float) -> None:
    """Complete changes that a cut log left unfinished, in every run."""
    for run in state.runs.values():
        for evaluation in run.active_evaluations.values():
            evaluation.left = sum(group.live for group in run.evaluation_groups(evaluation))  # events may be lost
        retire_out_of_bound(state, run, now)
        _quarantine_overdue(state, run, now)
        settle(state, run, now)


def _decide(state: SchedulerState, run: Run, group: Group, now: float) -> None:
    """Take one group's next step, after which it leaves ``undecided`` or has fewer steps left."""
    if group.state == "retired":
        _stop_members(state, group, now)
    elif group.state == "acked":
        retire(state, group, "acked", now)
    elif group.state == "eligible":
        retire(state, group, "failed", now)  # all its results were lost
    elif run.is_quarantined(group.task) and any(episode.state == "queued" for episode in group.members):
        for episode in group.members:
            if episode.state == "queued":
                end(state, episode, "failed", "quarantined", "Too many attempts of this task failed.", now)
    elif group.evaluation is not None:
        retire(state, group, "evaluated", now)
    elif reason := run.bound_violation(group):
        retire(state, group, reason, now)
    elif run.needs_top_up(group):
        _top_up(state, run, group, now)
    elif reason := run.drop_reason(group):
        retire(state, group, reason, now)
    elif group.cut:
        _stop_members(state, group, now)
    else:
        retire(state, group, "zero-variance", now)  # others that were decided with it have used up the bound


def _top_up(state: SchedulerState, run: Run, group: Group, now: float) -> None:
    number = len(group.members)
    seed = sampling_seed(run.spec.seed, group.position if group.position >= 0 else group.id, number)
    member = events.Member(state.new_id(), number, seed)
    emit(state, events.MemberAdded(run=run.name, group=group.id, member=member), now)


def retire(state: SchedulerState, group: Group, reason: str, now: float) -> None:
    """Retire a group, and stop its members that still run."""
    emit(state, events.GroupRetired(run=group.run, group=group.id, reason=reason), now)
    _stop_members(state, group, now)


def _stop_members(state: SchedulerState, group: Group, now: float) -> None:
    """Cancel the leased members of a group that is retired or cut, and end those that are queued again."""
    for episode in list(group.members):
        if episode.state == "leased":
            cancelled = events.AttemptCancelled(
                run=group.run, episode=episode.id, attempt=episode.attempt, reason=group.reason
            )
            emit(state, cancelled, now)
        elif episode.state == "queued":
            end(state, episode, "cancelled", group.reason, f"Its group continues without it: {group.reason}.", now)


def end(state: SchedulerState, episode: Episode, status: Status, kind: str, message: str, now: float) -> None:
    """End an episode whose result no worker will submit."""
    group = episode.group
    ended = events.EpisodeEnded(
        run=group.run,
        group=group.id,
        member=episode.member,
        episode=episode.id,
        attempt=episode.attempt,
        task=group.task,
        status=status,
        failure=Failure(layer="infrastructure", kind=kind, message=message),
        evaluation=group.evaluation.id if group.evaluation is not None else "",
        by_worker=False,
    )
    emit(state, ended, now)


def requeue(
    state: SchedulerState, episode: Episode, reason: str, counts: bool, failure: Failure | None, now: float
) -> None:
    """End an attempt without a result; the episode goes to the front of its queue."""
    ended = events.AttemptEnded(
        run=episode.group.run,
        episode=episode.id,
        attempt=episode.attempt,
        reason=reason,
        counts=counts,
        failure=failure,
    )
    emit(state, ended, now)


def has_attempts_left(run: Run, episode: Episode) -> bool:
    """True if the episode may be tried again after one more attempt that counts."""
    return episode.retries_used + 1 < run.spec.retries.max_attempts and not run.is_quarantined(episode.group.task)


def quarantine_if_due(state: SchedulerState, run: Run, task: Task, now: float) -> None:
    """Quarantine a task of which too many attempts failed."""
    if run.kills:
        kills = run.kills.get(task_key(task), [])
        if len(kills) >= run.spec.retries.quarantine_after and not run.is_quarantined(task):
            emit(state, events.TaskQuarantined(run=run.name, task=task, history=list(kills)), now)


def _quarantine_overdue(state: SchedulerState, run: Run, now: float) -> None:
    """Quarantine tasks whose kills are in a cut log without the quarantine that they caused."""
    limit = run.spec.retries.quarantine_after
    overdue = {key for key, kills in run.kills.items() if len(kills) >= limit and key not in run.quarantined}
    if overdue:
        for task in {task_key(group.task): group.task for group in run.groups.values()}.values():
            if task_key(task) in overdue:
                quarantine_if_due(state, run, task, now)


def lose_attempt(state: SchedulerState, episode: Episode, now: float) -> None:
    """Decide on an attempt whose lease ran out, or whose worker's name another process has taken."""
    run = state.run_of(episode)
    if episode.state == "cancelling":
        message = "The worker did not report the end of the cancelled attempt."
        end(state, episode, "cancelled", episode.group.reason, message, now)
    elif run.is_quarantined(episode.group.task):
        end(state, episode, "failed", "quarantined", "Too many attempts of this task failed.", now)
    elif _was_never_begun(state, run, episode):
        requeue(state, episode, events.NEVER_BEGUN, False, None, now)
    elif _was_dropped(state, run, episode):
        if has_attempts_left(run, episode):
            requeue(state, episode, "dropped", True, None, now)
        else:
            message = f"Worker {episode.worker} is alive and dropped attempt {episode.attempt}, the last of the budget."
            end(state, episode, "failed", "dropped", message, now)
    else:
        bound = run.max_lost_workers
        if episode.workers_lost < bound:
            requeue(state, episode, events.WORKER_LOST, False, None, now)
        else:
            process = state.holder_of(episode).process
            message = f"Worker {process} was lost; an episode may lose {bound} workers."
            end(state, episode, "failed", LEASE_EXPIRED, message, now)
    quarantine_if_due(state, run, episode.group.task, now)


def _was_never_begun(state: SchedulerState, run: Run, episode: Episode) -> bool:
    """True if the worker listed its attempts after it was granted this one, and never listed this one: the grant did
    not reach it. An attempt that it has listed was renewed then, so its lease began later."""
    return not episode.begun and state.holder_of(episode).listed > episode.deadline - run.spec.attempt_lease_s


def _was_dropped(state: SchedulerState, run: Run, episode: Episode) -> bool:
    """True if the worker listed its attempts in the second half of the lease, and left this one out. A lost worker
    looks different: its attempts were renewed with its last request, or granted just before it."""
    return state.holder_of(episode).listed > episode.deadline - run.spec.attempt_lease_s / 2


def retire_out_of_bound(state: SchedulerState, run: Run, now: float) -> None:
    """Retire a slice of the groups that the current version left behind. Unleased batches of such groups are dissolved
    first; leased ones stay, unless a rewind left one of their rows."""
    for batch in list(run.batches.values()):
        reasons = {run.bound_violation(group) for group in batch.groups}
        if "rewound" in reasons or ("stale" in reasons and not batch.leased and not batch.lapsed):
            reason = "rewound" if "rewound" in reasons else "stale"
            emit(state, events.BatchDissolved(run=run.name, batch=batch.id, reason=reason), now)
    ends = [(group, run.bound_violation(group)) for group in islice(_out_of_bound(run), SLICE)]
    _retire_slice(state, run, ends, now)


def _out_of_bound(run: Run) -> Iterator[Group]:
    for group in run.open_groups.values():
        if group.dispatch_order >= 0 and group.evaluation is None and run.bound_violation(group):
            yield group
    for index in (run.eligible, run.eligible_by_name):
        yield from index.out_of_bound(SLICE)


def _retire_slice(state: SchedulerState, run: Run, ends: list[tuple[Group, str]], now: float) -> None:
    for group, reason in ends:
        retire(state, group, reason, now)
    run.retiring = len(ends) == SLICE


def retire_next_slice(state: SchedulerState, run: Run, now: float) -> None:
    """Retire the next slice."""
    if not run.closed:
        retire_out_of_bound(state, run, now)
    settle(state, run, now)


def cut_overdue(state: SchedulerState, run: Run, now: float) -> None:
    """Cut the groups whose deadline for the rest of their members has passed."""
    overdue = [id for id, _ in takewhile(lambda item: item[1] <= now, run.cut_deadlines.items())]
    for id in overdue:
        del run.cut_deadlines[id]
        group = run.groups.get(id)
        if group is not None and run.waits_for_members(group):
            emit(state, events.GroupCut(run=run.name, group=id), now)
    if overdue:
        settle(state, run, now)


def evict(state: SchedulerState, run: Run, id: str, now: float) -> None:
    """Retire a group whose stored trajectories were lost; raises UnknownGroup, or Conflict if it is in a batch."""
    group = run.groups.get(id)
    if group is None:
        raise UnknownGroup(f"Run {run.name} has no group {id!r} in flight.")
    if group.state not in ("open", "eligible"):
        raise Conflict(f"Group {id} is {group.state} and cannot be evicted.")
    retire(state, group, "evicted", now)
    settle(state, run, now)


def stop_closed(state: SchedulerState, run: Run, now: float) -> None:
    """Dissolve the unleased batches of a closed run, and retire a slice of its groups. A leased batch may still be
    acked."""
    for batch in [batch for batch in run.batches.values() if not batch.leased]:
        emit(state, events.BatchDissolved(run=run.name, batch=batch.id, reason="closed"), now)
    remaining = (group for group in run.groups.values() if group.state in ("open", "eligible", "acked"))
    ends = [(group, "acked" if group.state == "acked" else "closed") for group in islice(remaining, SLICE)]
    _retire_slice(state, run, ends, now)


def admit_ahead(state: SchedulerState, run: Run, now: float) -> None:
    """Admit as many groups as the credit allows, up to a full queue."""
    while run.admits and admit_next(state, run, now):
        pass


def admit_next(state: SchedulerState, run: Run, now: float) -> bool:
    """Admit the next group of the run's own source; False at its end."""
    upcoming = run.next_task()
    if upcoming is None:
        return False
    position, task = upcoming
    admit_group(state, run, state.new_id(), task, run.spec.group_size, now, position=position)
    return True


def admit_group(
    state: SchedulerState,
    run: Run,
    group: str,
    task: Task,
    size: int,
    now: float,
    *,
    position: int = -1,
    submitted: bool = False,
    evaluation: str = "",
) -> None:
    """Admit a group of ``size`` new episodes."""
    key: int | str = position if position >= 0 else group
    members = [
        events.Member(state.new_id(), number, sampling_seed(run.spec.seed, key, number)) for number in range(size)
    ]
    admitted = events.GroupAdmitted(
        run=run.name,
        group=group,
        task=task,
        policy=PolicyRef(base=run.spec.policy.base, adapter=run.spec.policy.adapter),
        members=members,
        position=position,
        submitted=submitted,
        evaluation=evaluation,
        adapters=assign_adapters(run.spec, run.admitted),
    )
    emit(state, admitted, now)

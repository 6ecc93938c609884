"""Transitions of groups: admission, top-up, cut, retirement.

* An event that does not fit changes nothing and raises.
* An event proves the events that must have come before it: a retired group, that its batch was acked or dissolved.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InternalError
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.batches import end_batch_of
from headrace_orchestrator.scheduler.apply.group_progress import drop_undispatched, enqueue, move, review
from headrace_orchestrator.scheduler.state.admission.task_sources import task_key
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run, remember
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

FAILURE_REASONS = frozenset({"failed", "incomplete", "quarantined"})
"""Reasons of retirement that a failed episode causes, of the group or of an earlier one of its task."""

UNUSABLE_REASONS = frozenset({"no-rows", "prompts-differ"})
"""Reasons of retirement of groups that could not be used although no episode failed."""

RETURNING_REASONS = frozenset({"stale", "rewound", "evicted"})
"""Reasons of retirement after which the task of a fixed list is drawn again, if no batch with it was acked."""

MAX_FAILURE = 500
"""Maximum characters of a failure kept for the learner that awaits the group: a sentence, not a traceback."""


def group_admitted(state: SchedulerState, event: events.GroupAdmitted, now: float) -> None:
    run = state.runs[event.run]
    evaluation = run.evaluations[event.evaluation] if event.evaluation else None
    group = Group(run.name, event.group, event.task, event.position, event.submitted, evaluation)
    run.groups[group.id] = run.open_groups[group.id] = group
    group.size = len(event.members)
    group.adapters = event.adapters
    run.admitted += 1
    if evaluation is None:
        run.group_states["open"] += 1
        run.shares.count_drawn(event.task)
    if event.position >= 0:
        run.returned.pop(event.position, None)
        run.position = max(run.position, event.position + 1)
        run.ledger.in_flight += 1
    if run.is_for_any_pull(group):
        run.open += 1
    if evaluation is not None:
        evaluation.groups.append(group.id)
    enqueue(run, group, event.members, first=False)


def member_added(state: SchedulerState, event: events.MemberAdded, now: float) -> None:
    run = state.runs[event.run]
    group = run.groups[event.group]
    if group.state != "open":
        raise InternalError(f"Group {group.id} cannot get a member: it is {group.state}.")
    group.added_members += 1
    run.selected["topped_up"] += 1
    # The rest of its group was dispatched before all queued episodes.
    enqueue(run, group, [event.member], first=True)
    review(run, group)


def group_cut(state: SchedulerState, event: events.GroupCut, now: float) -> None:
    run = state.runs[event.run]
    cut(run, run.groups[event.group])


def cut(run: Run, group: Group) -> None:
    """Stop waiting for the live members of a group."""
    if group.state != "open":
        raise InternalError(f"Group {group.id} cannot be cut: it is {group.state}.")
    group.reason = events.PARTIAL
    drop_undispatched(run, group, "GroupCut")
    review(run, group)


def group_retired(state: SchedulerState, event: events.GroupRetired, now: float) -> None:
    run = state.runs[event.run]
    retire(run, run.groups[event.group], event.reason)


def retire(run: Run, group: Group, reason: str) -> None:
    """End a group, and give its credit and bytes back."""
    if group.state == "leased":
        end_batch_of(run, group, reason)
    group.require_move("retired", reason)
    if group.state == "eligible":
        run.index_of(group).remove(group)
    if group.state == "open":
        del run.open_groups[group.id]
        run.in_progress.pop(group.id, None)
        if run.is_for_any_pull(group):
            run.open -= 1
    if group.position >= 0:
        run.ledger.in_flight -= 1
        if reason in RETURNING_REASONS and run.spec.source == "list" and not group.uses:
            _return_task(run, group)
    if group.evaluation is None:
        run.ledger.held_bytes -= group.held_bytes
        run.ledger.unfinished -= group.live
        _count_retired(run, group, reason)
    move(run, group, "retired", reason)
    group.reason = reason
    if group.evaluation is not None:
        group.evaluation.cut |= reason == "deadline"
    if group.submitted:
        remember(run.submitted_ends, group.id, reason)
        if reason in FAILURE_REASONS and (failure := _last_failure(run, group)):
            remember(run.submitted_failures, group.id, failure)
    if run.spec.source == "mixture" and run.kills and not run.is_quarantined(group.task):
        run.kills.pop(task_key(group.task), None)
    drop_undispatched(run, group, reason)
    review(run, group)


def _return_task(run: Run, group: Group) -> None:
    """Draw the task of an unserved group again: it did not fail."""
    if not run.closed and not run.is_quarantined(group.task):
        run.returned[group.position] = None


def _count_retired(run: Run, group: Group, reason: str) -> None:
    run.retired[reason] += 1
    if reason == "stale":
        run.stale_since_batch += 1
        run.stale_in_row += 1
    elif reason == "zero-variance" and run.is_for_any_pull(group):
        run.zero_variance_since_batch += 1
        run.zero_variance_tokens += group.row_tokens
    elif reason == "row-too-long":
        run.too_long_since_batch += 1
    elif reason in UNUSABLE_REASONS:
        run.unusable_in_row += 1


def _last_failure(run: Run, group: Group) -> str:
    failures = [episode.failure for episode in group.members if episode.failure is not None]
    if failures:
        return _shortened(f"{failures[-1].layer}/{failures[-1].kind}: {failures[-1].message}")
    kills = run.kills.get(task_key(group.task)) if run.is_quarantined(group.task) else None
    return _shortened(kills[-1]) if kills else ""


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_FAILURE else f"{text[: MAX_FAILURE - 3]}..."


def priorities_set(state: SchedulerState, event: events.PrioritiesSet, now: float) -> None:
    run = state.runs[event.run]
    for id, priority in event.priorities.items():
        group = run.groups.get(id)
        if group is not None:
            group.priority = priority
            run.eligible.update_weight(group)


TRANSITIONS: dict[type[events.Event], Callable[..., None]] = {
    events.GroupAdmitted: group_admitted,
    events.MemberAdded: member_added,
    events.GroupCut: group_cut,
    events.GroupRetired: group_retired,
    events.PrioritiesSet: priorities_set,
}

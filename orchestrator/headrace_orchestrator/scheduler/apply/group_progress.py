"""The progress of a group towards its end: queued members, counts, and the review after every change.

``review`` makes a complete group eligible, forgets one that is over, and puts one in ``Run.undecided`` where a command
must decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_orchestrator.scheduler.events import Member
from headrace_orchestrator.scheduler.state.groups import Episode, EpisodeState, Group, GroupState
from headrace_orchestrator.scheduler.state.run import Run


def move(run: Run, group: Group, to: GroupState, cause: str) -> None:
    """Change the state of a group, and the run's counts by state."""
    before = group.state
    group.move(to, cause)
    if group.evaluation is None:
        run.group_states[before] -= 1
        run.group_states[to] += 1


def enqueue(run: Run, group: Group, members: Sequence[Member], *, first: bool) -> None:
    """Add queued members to a group, at the head of the queue or at its end."""
    episodes = [Episode(group, member.episode, member.member, member.sampling_seed) for member in members]
    run.episodes.update({episode.id: episode for episode in episodes})
    group.members += episodes
    group.live += len(episodes)
    if group.evaluation is None:
        run.ledger.unfinished += len(episodes)
        run.queued += len(episodes)
    else:
        run.evaluation_queued += len(episodes)
    queue = run.queue if group.evaluation is None else run.evaluation_queue
    if first:
        queue.extendleft(episodes)
    else:
        queue.extend(episodes)


def assign_dispatch_order(run: Run, group: Group, now: float = 0.0) -> None:
    """Assign the group's place in the order of dispatch, at its first dispatch, or at an event that proves a dispatch
    which was lost in the log."""
    if group.dispatch_order < 0:
        group.dispatch_order = run.next_dispatch_order
        run.next_dispatch_order += 1
        group.begun_at = now
        if group.state == "open" and run.is_for_any_pull(group):
            run.in_progress[group.id] = group


def count_ended(run: Run, group: Group, before: EpisodeState) -> None:
    """Count a member that is not live any more; ``before`` is the state that it left."""
    group.live -= 1
    if group.evaluation is None:
        if before == "queued":
            run.queued -= 1
        else:
            run.leased -= 1
    elif before == "queued":
        run.evaluation_queued -= 1
    else:
        run.evaluation_leased -= 1


def drop_undispatched(run: Run, group: Group, cause: str) -> None:
    """End the members that were never dispatched; they have no trajectory record."""
    for episode in group.members:
        if episode.state == "queued" and episode.attempt == 0:
            episode.move("vanished", cause)
            count_ended(run, group, "queued")
            if group.evaluation is not None:
                group.evaluation.left -= 1
            elif group.state != "retired":
                run.ledger.unfinished -= 1


def review(run: Run, group: Group) -> None:
    """Make a complete group eligible, forget one that is over, or note that a decision is needed."""
    run.undecided.pop(group.id, None)
    if group.state == "retired":
        if not group.live:
            _forget_members(run, group)
            del run.groups[group.id]
        elif any(episode.state in ("queued", "leased") for episode in group.members):
            run.undecided[group.id] = group
    elif group.state == "open" and _needs_decision(run, group):
        run.undecided[group.id] = group
    elif group.state == "open" and not group.live:
        complete(run, group)


def complete(run: Run, group: Group) -> None:
    """Make an open group eligible."""
    move(run, group, "eligible", "complete")
    del run.open_groups[group.id]
    run.in_progress.pop(group.id, None)
    run.stale_in_row = run.unusable_in_row = 0
    if group.evaluation is None and group.has_zero_variance():
        run.selected["zero_variance"] += 1
    run.ledger.learn_tokens(group.row_tokens)
    if run.is_for_any_pull(group):
        run.open -= 1
    _forget_members(run, group)
    group.release_members()
    index(run, group)


def index(run: Run, group: Group) -> None:
    """Put an eligible group in its index."""
    assign_dispatch_order(run, group)
    run.index_of(group).add(group, run.versions)


def _forget_members(run: Run, group: Group) -> None:
    for episode in group.members:
        run.episodes.pop(episode.id, None)


def _needs_decision(run: Run, group: Group) -> bool:
    if run.is_quarantined(group.task) and any(episode.state == "queued" for episode in group.members):
        return True
    if group.evaluation is not None:
        return not group.live
    if group.cut and any(episode.state in ("queued", "leased") for episode in group.members):
        return True
    return bool(run.needs_top_up(group) or run.bound_violation(group) or run.drop_reason(group))

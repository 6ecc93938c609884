"""Invariants of the state.

* Groups in flight are exactly the run's own groups that are not retired.
* Each group's state agrees with its members' states; a complete group has released its members.
* Between commands no group waits for a decision and no credit lies idle; out-of-bound groups are retired in slices.
* An attempt is held by exactly the worker that it was granted to.
* A group in a batch is in exactly one and is leased; a group in no batch is not leased.
* Bytes held and episodes reserved are those of the groups in flight.
* No grant goes beyond the concurrency cap.
* Every index agrees with the episodes and groups; queues, eligible groups and counts are indexes.
"""

from __future__ import annotations

from collections import Counter

from headrace_orchestrator.scheduler.events import USABLE
from headrace_orchestrator.scheduler.state.eligible.draw_weights import equal_weight, weight_function
from headrace_orchestrator.scheduler.state.eligible.eligible_index import EligibleIndex
from headrace_orchestrator.scheduler.state.groups import AT_WORKER, COMPLETE, Episode, Group
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def check_invariants(state: SchedulerState) -> None:
    """Raise AssertionError, with the history, if an invariant does not hold."""
    held: dict[str, str] = {}
    for worker in state.workers.by_name.values():
        for id, episode in worker.attempts.items():
            _require(id not in held, f"episode {id} is held by {held.get(id)} and {worker.name}", episode)
            held[id] = worker.name
            _require(episode.worker == worker.name, f"{worker.name} holds an attempt of {episode.worker}", episode)
            _require(episode.state in AT_WORKER, f"{worker.name} holds it", episode)
            watched = worker.watched
            _require(watched is not None and watched <= episode.deadline, "its lease is not watched", episode)
    count = 0
    for run in state.runs.values():
        count += _check_run(state, run, held)
    _require(count == len(state.episodes), f"{len(state.episodes)} episodes are indexed, {count} belong to groups")
    slots: Counter[str] = Counter()
    for worker in state.workers.by_name.values():
        slots[worker.pool] += 0 if worker.silent else worker.slots
    _require(+slots == +state.workers.slots, f"slots are {slots}, counted {state.workers.slots}")


def _check_run(state: SchedulerState, run: Run, held: dict[str, str]) -> int:
    episodes = 0
    states: Counter[str] = Counter()
    queued = {id(episode): queue for queue in (run.queue, run.evaluation_queue) for episode in queue}
    for group in run.groups.values():
        _check_group(run, group)
        for episode in group.members:
            episodes += 1
            kind = "evaluation " if group.evaluation is not None else ""
            states[kind + episode.state] += 1
            if episode.state != "vanished":
                _require(state.episodes.get(episode.id) is episode, "the index has another episode", episode)
            _require((episode.state in AT_WORKER) == (episode.id in held), "state and worker disagree", episode)
            if episode.state == "queued":
                queue = run.evaluation_queue if kind else run.queue
                _require(queued.get(id(episode)) is queue, "it is queued in no queue", episode)
    _require(not run.undecided, f"run {run.name} has groups that wait for a decision: {list(run.undecided)}")
    _require(run.queued == states["queued"], f"run {run.name} counts {run.queued} queued, has {states['queued']}")
    _require(run.evaluation_queued == states["evaluation queued"], f"run {run.name} miscounts queued evaluation")
    _require(run.leased == states["leased"] + states["cancelling"], f"run {run.name} miscounts leased episodes")
    _require(
        run.evaluation_leased == states["evaluation leased"] + states["evaluation cancelling"],
        f"run {run.name} miscounts leased evaluation episodes",
    )
    cap = run.concurrency_cap
    _require(
        cap.slots is None or run.leased <= max(cap.slots, cap.leased_before),
        f"run {run.name} has {run.leased} training episodes at workers, its policy servers take {cap.slots}",
    )
    _check_ledger(run)
    _check_batches(run)
    _check_indexes(run)
    return episodes


def _check_ledger(run: Run) -> None:
    ledger = run.ledger
    in_flight = [group for group in run.groups.values() if group.state != "retired" and group.evaluation is None]
    own = [group for group in in_flight if not group.submitted]
    names = ", ".join(f"{group.id} {group.state}" for group in own)
    _require(ledger.in_flight == len(own), f"run {run.name} counts {ledger.in_flight} groups in flight; has {names}")
    _require(ledger.held_bytes == sum(group.held_bytes for group in in_flight), f"run {run.name} miscounts held bytes")
    live = sum(group.live for group in in_flight)
    _require(ledger.unfinished == live, f"run {run.name} reserves for {ledger.unfinished} episodes, {live} are live")
    is_open = sum(group.state == "open" and run.is_for_any_pull(group) for group in in_flight)
    _require(run.open == is_open, f"run {run.name} counts {run.open} open groups, has {is_open}")
    counted = Counter(group.state for group in in_flight)
    known = Counter({state: count for state, count in run.group_states.items() if state != "retired"})
    _require(+known == counted, f"run {run.name} counts groups {dict(known)}, has {dict(counted)}")
    if run.admits and not ledger.bounds.exist:  # room that another run gives back is used at the next tick
        _require(run.next_task() is None, f"run {run.name} lets {ledger.free} groups of credit lie idle")


def _check_group(run: Run, group: Group) -> None:
    members = Counter(episode.state for episode in group.members)
    live = members["queued"] + members["leased"] + members["cancelling"]
    usable = sum(episode.state in USABLE and bool(episode.rewards) for episode in group.members)
    if group.state in COMPLETE:
        usable = len(group.trajectories)
    context = f"group {group.id} is {group.state} with {dict(members)}; its history: {group.history}"
    _require(group.live == live, f"it counts {group.live} live members: {context}")
    _require(len({e.id for e in group.members}) == len(group.members), f"a member is listed twice: {context}")
    if group.state == "retired":
        _require(live > 0, f"it should be forgotten: {context}")
        _require(not members["queued"] and not members["leased"], f"members of a retired group continue: {context}")
        return
    _require((group.state == "open") == (live > 0), f"complete and open at once, or neither: {context}")
    _require(group.usable == usable, f"it counts {group.usable} usable members: {context}")
    _require(not group.members or group.state not in COMPLETE, f"its members should be released: {context}")
    _require(group.state != "acked", f"it should be retired: {context}")
    _require(group.cut or not members["cancelling"], f"a member of a group in flight is being cancelled: {context}")
    if (
        group.evaluation is None
        and run.spec.short_groups == "top_up"
        and group.added_members < group.size
        and not run.closed
        and not group.cut
    ):
        hopeless = 0 if usable else group.rowless
        whole = live + usable + hopeless >= group.size or run.is_quarantined(group.task) or group.damaged
        _require(whole, f"it has fewer members than it waits for: {context}")
    if group.evaluation is None and group.state in ("open", "eligible"):
        violation = run.bound_violation(group)
        _require(run.retiring or not violation, f"it is {violation}: {context}")
    if group.state != "open":
        _require(usable > 0 or group.damaged, f"it has no usable members: {context}")


def _check_batches(run: Run) -> None:
    in_batches: Counter[str] = Counter()
    for batch in run.batches.values():
        for group in batch.groups:
            in_batches[group.id] += 1
            _require(group.state == "leased", f"batch {batch.id} has group {group.id}, which is {group.state}")
            _require(group.batch == batch.id, f"group {group.id} of batch {batch.id} says it is in {group.batch!r}")
            _require(run.groups.get(group.id) is group, f"batch {batch.id} has forgotten group {group.id}")
    for group in run.groups.values():
        _require(
            (group.state == "leased") == (in_batches[group.id] == 1), f"group {group.id} is in no batch or several"
        )


def _check_indexes(run: Run) -> None:
    bound = run.spec.max_staleness
    eligible = EligibleIndex(bound, weight_function(run.spec.selection))
    eligible_by_name = EligibleIndex(bound, equal_weight)
    for group in run.groups.values():
        if group.state == "eligible":
            (eligible if run.is_for_any_pull(group) else eligible_by_name).add(group, run.versions)
    for kept, rebuilt in ((run.eligible, eligible), (run.eligible_by_name, eligible_by_name)):
        actual, expected = kept.contents(), rebuilt.contents()
        _require(actual == expected, f"run {run.name} has {actual} in its index as eligible, not {expected}")
    is_open = [group.id for group in run.groups.values() if group.state == "open"]
    in_progress = sorted((g.dispatch_order, g.id) for g in run.open_groups.values() if run.is_for_any_pull(g))
    dispatched = [id for place, id in in_progress if place >= 0]
    _require(list(run.in_progress) == dispatched, f"run {run.name} lists {list(run.in_progress)} as in progress")
    _require(list(run.open_groups) == is_open, f"run {run.name} lists {list(run.open_groups)} as open; {is_open} are")


def _require(holds: bool, context: str, episode: Episode | None = None) -> None:
    if holds:
        return
    if episode is not None:
        context += f": episode {episode.id} attempt {episode.attempt} is {episode.state}; "
        context += f"its history: {episode.history}"
    raise AssertionError(context)

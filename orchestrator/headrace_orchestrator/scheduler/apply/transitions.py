"""How each event changes the state of a run.

* An event that does not fit changes nothing and raises; of a dispatch the grants that fit are taken.
* A terminal record that was lost costs itself only; the events after it are taken as far as they go.
* An event proves what must have come before it: a retired group, that its batch was acked or dissolved; a cancelled
  attempt, that its group was retired; a new batch, that the one before it was dissolved.
* A lost worker draws no retry budget and kills nothing on its own; an episode that lost too many counts once a worker.
* A group that only pulls by name may take is served once; the others as often as the run says.
* An evaluation that runs is never forgotten.
* A batch definition that was lost costs itself only; its version stands, and its groups retire by events of their own.

Only these functions, and the scheduler state that calls them, write durable state; the commands decide. After every
event its group is reviewed: it becomes eligible by itself, or is put in ``due`` where someone must decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InternalError
from headrace.trajectory import Failure, Version
from headrace.wire.policy_server import BAD_RESPONSE_KINDS
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.admission.task_sources import task_key
from headrace_orchestrator.scheduler.state.batches import EARLIER_SESSIONS, SHARDED_PULLS, Batch, Sessions
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import TERMINAL, USABLE, Episode, EpisodeState, Group
from headrace_orchestrator.scheduler.state.run import REMEMBERED_EVALUATIONS, REMEMBERED_LINES, Run, remember

LEASE_EXPIRED = "lease-expired"
"""Kind of the failure that ends an episode which lost too many workers."""

UNCOUNTED_KINDS = frozenset({"drained", "cancelled", "quarantined"})
"""Kinds of infrastructure failure that the task has no part in."""

ENDED_BY_FAILURE = frozenset({"failed", "incomplete"})
"""Reasons of retirement behind which there is a failed episode."""

MAX_FAILURE = 500
"""Characters of a failure that are kept for whoever awaits the group: a sentence, not a traceback."""


def admitted(run: Run, event: events.GroupAdmitted) -> None:
    evaluation = run.evaluations[event.evaluation] if event.evaluation else None
    group = Group(run, event.group, event.task, event.position, event.submitted, evaluation)
    run.groups[group.id] = run.open_groups[group.id] = group
    group.size = len(event.members)
    group.adapters = event.adapters
    run.admitted += 1
    if evaluation is None:
        run.states["open"] += 1
    if event.position >= 0:
        run.position = event.position + 1
        run.ledger.in_flight += 1
    if run.plain(group):
        run.open += 1
    if evaluation is not None:
        evaluation.groups.append(group)
    _enqueue(run, group, event.members, first=False)


def member(run: Run, event: events.MemberAdded) -> None:
    group = run.groups[event.group]
    if group.state != "open":
        raise InternalError(f"A member is added to group {group.id}, which is {group.state}.")
    group.extra += 1
    run.selected["topped_up"] += 1
    # The rest of its group is ahead of all that is queued.
    _enqueue(run, group, [event.member], first=True)
    review(run, group)


def _enqueue(run: Run, group: Group, members: Sequence[events.Member], *, first: bool) -> None:
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


def dispatched(run: Run, episode: Episode, grant: events.Grant, worker: str, version: Version) -> None:
    episode.move("leased", "Dispatched")
    episode.attempt = grant.attempt
    episode.nonce = grant.nonce
    episode.worker = worker
    episode.version = version
    group = episode.group
    _give_order(run, group)
    if group.evaluation is None:
        run.queued -= 1
        run.leased += 1
    else:
        run.evaluation_queued -= 1
        run.evaluation_leased += 1


def _give_order(run: Run, group: Group) -> None:
    """Its place in the order of dispatch, with its first dispatch, or with what proves one that was lost in the log."""
    if group.order < 0:
        group.order = run.next_order
        run.next_order += 1


def trim_queues(run: Run) -> None:
    """Drop what is queued no longer from the queues. It is at their heads, but for what ended while it was queued, or
    was dispatched before in a log that lost that."""
    for queue, queued in ((run.queue, run.queued), (run.evaluation_queue, run.evaluation_queued)):
        while queue and queue[0].state != "queued":
            queue.popleft()
        if len(queue) > queued:
            left = [episode for episode in queue if episode.state == "queued"]
            queue.clear()
            queue.extend(left)


def attempt_ended(run: Run, episode: Episode, event: events.AttemptEnded) -> None:
    episode.move("queued", event.reason)
    if event.reason == events.WORKER_LOST:
        episode.losses += 1
    if event.counts:
        episode.draws += 1
        run.recent.append(event.failure)
        if event.failure is None:
            _killed(run, episode, f"{event.reason} at worker {episode.worker}")
    if episode.group.evaluation is None:
        run.leased -= 1
        run.queued += 1
        run.queue.appendleft(episode)
    else:
        run.evaluation_leased -= 1
        run.evaluation_queued += 1
        run.evaluation_queue.appendleft(episode)
    review(run, episode.group)


def episode_ended(run: Run, episode: Episode, event: events.EpisodeEnded) -> None:
    group = episode.group
    was = episode.state
    episode.end(event)
    _give_order(run, group)
    _left(run, group, was)
    if event.status == "failed":
        _count_failure(run, episode, event.failure)
    elif event.status != "cancelled":
        run.recent.append(None)
    if group.evaluation is not None:
        group.evaluation.take(event)
    else:
        run.ends[event.status] += 1
        if event.rewards and event.status in USABLE:
            run.rewards.append(sum(event.rewards.values()))
    if group.state == "retired":
        review(run, group)
        return
    if event.status in USABLE:
        group.usable += 1
        group.row_tokens += event.row_tokens
        group.longest_row = max(group.longest_row, event.longest_row)
    if group.evaluation is None:
        group.held_bytes += event.size_bytes
        run.ledger.held_bytes += event.size_bytes
        run.ledger.unfinished -= 1
        if event.by_worker:
            run.ledger.saw_record(event.size_bytes)
    if not (group.live and event.status in USABLE and _in_bound(run, event)) or run.too_long(group):
        review(run, group)


def _in_bound(run: Run, event: events.EpisodeEnded) -> bool:
    """Whether the record alone cannot make its group stale; spares most records the review of their group."""
    now, low = run.versions.now, event.low
    if low is None or low.lineage != now.lineage or now.n - low.n > run.spec.max_staleness:
        return False
    return event.high is None or event.high.lineage == now.lineage


def _left(run: Run, group: Group, was: EpisodeState) -> None:
    """A member is over: it is live no more."""
    group.live -= 1
    if group.evaluation is None:
        if was == "queued":
            run.queued -= 1
        else:
            run.leased -= 1
    elif was == "queued":
        run.evaluation_queued -= 1
    else:
        run.evaluation_leased -= 1


def _count_failure(run: Run, episode: Episode, failure: Failure | None) -> None:
    if failure is None:
        return
    if failure.kind not in UNCOUNTED_KINDS:
        run.recent.append(failure)
        # An engine that is away says nothing about the task; one that answers it wrongly again and again does.
        if failure.layer != "policy" or failure.kind in BAD_RESPONSE_KINDS:
            what = f"{failure.layer}/{failure.kind}: {failure.message}"
            _killed(run, episode, what, once=failure.kind == LEASE_EXPIRED)


def _killed(run: Run, episode: Episode, what: str, *, once: bool = False) -> None:
    history = run.kills.setdefault(task_key(episode.group.task), [])
    if once and any(line.endswith(what) for line in history):
        return  # one worker took several episodes of the task with it
    history.append(f"episode {episode.id} attempt {episode.attempt}: {what}")


def cut(run: Run, group: Group) -> None:
    """Its live members are not waited for any longer."""
    if group.state != "open":
        raise InternalError(f"Group {group.id} is cut, which is {group.state}.")
    group.reason = events.PARTIAL
    _vanish(run, group, "GroupCut")
    review(run, group)


def quarantined(run: Run, event: events.TaskQuarantined) -> None:
    key = task_key(event.task)
    run.quarantined[key] = event.task
    for group in list(run.open_groups.values()):
        if task_key(group.task) == key:
            _vanish(run, group, "TaskQuarantined")
            review(run, group)


def _last_failure(group: Group) -> str:
    failures = [episode.failure for episode in group.members if episode.failure is not None]
    return _shortened(f"{failures[-1].layer}/{failures[-1].kind}: {failures[-1].message}") if failures else ""


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_FAILURE else f"{text[: MAX_FAILURE - 3]}..."


def _vanish(run: Run, group: Group, cause: str) -> None:
    """Members that were never dispatched never will be."""
    for episode in group.members:
        if episode.state == "queued" and episode.attempt == 0:
            episode.move("vanished", cause)
            _left(run, group, "queued")
            if group.evaluation is not None:
                group.evaluation.left -= 1
            elif group.state != "retired":
                run.ledger.unfinished -= 1


def retired(run: Run, event: events.GroupRetired) -> None:
    group = run.groups[event.group]
    if group.state == "leased":
        _batch_over(run, group, event.reason)
    group.require("retired", event.reason)
    if group.state == "eligible":
        _not_eligible(run, group)
    if group.state == "open":
        del run.open_groups[group.id]
        if run.plain(group):
            run.open -= 1
    if group.position >= 0:
        run.ledger.in_flight -= 1
    if group.evaluation is None:
        run.ledger.held_bytes -= group.held_bytes
        run.ledger.unfinished -= group.live
        run.retired[event.reason] += 1
        if event.reason == "stale":
            run.stale_since_batch += 1
            run.stale_in_row += 1
        elif event.reason == "zero-variance" and run.plain(group):
            run.zero_variance_since_batch += 1
            run.zero_variance_tokens += group.row_tokens
        elif event.reason == "row-too-long":
            run.too_long_since_batch += 1
    group.move("retired", event.reason)
    group.reason = event.reason
    if group.evaluation is not None:
        group.evaluation.cut |= event.reason == "deadline"
    if group.submitted:
        remember(run.submitted_ends, group.id, event.reason)
        if event.reason in ENDED_BY_FAILURE and (failure := _last_failure(group)):
            remember(run.submitted_failures, group.id, failure)
    if run.spec.source == "mixture" and run.kills and not run.is_quarantined(group.task):
        run.kills.pop(task_key(group.task), None)
    _vanish(run, group, event.reason)
    review(run, group)


def _batch_over(run: Run, group: Group, reason: str) -> None:
    """A group is over, so its batch is; the event that said so was lost in the log."""
    batch = run.batches[group.batch]
    if reason == "acked":
        batch_acked(run, events.BatchAcked(run=run.name, batch=batch.id, generation=batch.generation))
    else:
        batch_dissolved(run, events.BatchDissolved(run=run.name, batch=batch.id, reason=reason))


def batch_formed(run: Run, event: events.BatchFormed) -> list[Episode]:
    """Returns episodes that were over when the batch was formed, and whose terminal records are lost."""
    groups = [run.groups[id] for id in event.groups]
    for group in groups:
        if group.state not in ("open", "eligible", "leased"):
            raise InternalError(f"Batch {event.batch} takes group {group.id}, which is {group.state}.")
    lost: list[Episode] = []
    for group in groups:
        if group.state == "open":
            lost += _members_lost(run, group)
        elif group.state == "leased":
            _batch_over(run, group, "its groups are in another batch")
    for group in groups:
        _count_selected(run, group, event.filtered)
        run.due.pop(group.id, None)
        _not_eligible(run, group)
        group.move("leased", "BatchFormed")
        group.batch = event.batch
    run.batches[event.batch] = Batch(event.batch, groups, event.version)
    run.batches_formed += 1
    run.stale_since_batch = run.too_long_since_batch = 0
    if run.plain(groups[0]):
        run.zero_variance_since_batch = run.zero_variance_tokens = 0
    return lost


def _count_selected(run: Run, group: Group, filtered: bool) -> None:
    run.selected[run.spec.selection.order if run.plain(group) else "awaited"] += 1
    if filtered:
        run.selected["filtered"] += 1
    if group.uses:
        run.selected["reused"] += 1
    if group.usable < group.size:
        run.selected["short"] += 1
    if group.cut:
        run.selected["partial"] += 1


def _members_lost(run: Run, group: Group) -> list[Episode]:
    """A group was complete when its batch was formed: a terminal record that is missing here was lost in the log."""
    lost = [episode for episode in group.members if episode.state not in TERMINAL]
    for episode in lost:
        episode.require("failed", "its record was lost")
        _left(run, group, episode.state)
        run.ledger.unfinished -= 1
        episode.move("failed", "its record was lost")
    group.damaged = True
    run.due.pop(group.id, None)
    _complete(run, group)
    return lost


def batch_leased(run: Run, event: events.BatchLeased) -> None:
    run.batches[event.batch].lease(event)
    sessions = session_now(run, event.learner, event.session)
    if event.shards > 1:
        remember(sessions.pulls, event.request, event.batch, SHARDED_PULLS)


def session_now(run: Run, learner: str, session: str) -> Sessions:
    """A learner acts in this session; the one before is over."""
    sessions = run.sessions.get(learner)
    if sessions is None or sessions.now != session:
        earlier = [] if sessions is None else [*sessions.earlier, sessions.now][-EARLIER_SESSIONS:]
        sessions = Sessions(session, earlier)
        remember(run.sessions, learner, sessions)
    return sessions


def batch_dissolved(run: Run, event: events.BatchDissolved) -> None:
    batch = run.batches.pop(event.batch)
    remember(run.closed_batches, batch.id, batch.closed("dissolved", reason=event.reason))
    if event.unseen and batch.learner in run.sessions:
        run.sessions[batch.learner].pulls.pop(batch.request, None)
    for group in batch.groups:
        group.batch = ""
        group.move("eligible", "BatchDissolved")
        _eligible(run, group)
        _drop_if_empty(run, group)


def batch_acked(run: Run, event: events.BatchAcked) -> None:
    batch = run.batches.pop(event.batch, None)
    if event.version is not None:
        run.announce(event.version, None, event.weights)
    if batch is None:
        # Its definition was lost in the log. The version stands, and its groups retire by records of their own.
        return
    version = str(event.version) if event.version is not None else ""
    remember(run.closed_batches, batch.id, batch.closed("acked", version))
    run.batches_acked += 1
    for group in batch.groups:
        group.uses += 1
        group.batch = ""
        if group.uses < run.spec.max_uses and run.plain(group):
            # It keeps its place in the order of dispatch: at the tail it would go stale before its turn.
            group.move("eligible", "BatchAcked")
            _eligible(run, group)
            _drop_if_empty(run, group)
        else:
            group.move("acked", "BatchAcked")
            run.due[group.id] = group


def _drop_if_empty(run: Run, group: Group) -> None:
    """A group of which all records were lost is not served again."""
    if not group.usable:
        run.due[group.id] = group


def evaluation(run: Run, evaluation: Evaluation) -> None:
    run.evaluations[evaluation.id] = evaluation
    lines = sum(known.wanted for known in run.evaluations.values())
    for old in [known for known in run.evaluations.values() if known.reason]:
        if len(run.evaluations) <= REMEMBERED_EVALUATIONS and lines <= REMEMBERED_LINES:
            break
        del run.evaluations[old.id]
        lines -= old.wanted
    run.active_evaluations[evaluation.id] = evaluation


def review(run: Run, group: Group) -> None:
    """Make a complete group eligible, forget one that is over, or put it in ``due`` where a decision is needed."""
    run.due.pop(group.id, None)
    if group.state == "retired":
        if not group.live:
            _forget_members(run, group)
            del run.groups[group.id]
        elif any(episode.state in ("queued", "leased") for episode in group.members):
            run.due[group.id] = group
    elif group.state == "open" and _needs_decision(run, group):
        run.due[group.id] = group
    elif group.state == "open" and not group.live:
        _complete(run, group)


def _complete(run: Run, group: Group) -> None:
    group.move("eligible", "complete")
    del run.open_groups[group.id]
    run.stale_in_row = 0
    if group.evaluation is None and group.zero_variance():
        run.selected["zero_variance"] += 1
    run.ledger.saw_group(group.row_tokens)
    if run.plain(group):
        run.open -= 1
    _forget_members(run, group)
    group.put_away()
    _eligible(run, group)


def _forget_members(run: Run, group: Group) -> None:
    for episode in group.members:
        run.episodes.pop(episode.id, None)


def _needs_decision(run: Run, group: Group) -> bool:
    if _queued_in_quarantine(run, group):
        return True
    if group.evaluation is not None:
        return not group.live
    if group.cut and any(episode.state in ("queued", "leased") for episode in group.members):
        return True
    return bool(run.top_up_due(group) or run.out_of_bound(group) or run.dropped(group))


def _queued_in_quarantine(run: Run, group: Group) -> bool:
    return run.is_quarantined(group.task) and any(episode.state == "queued" for episode in group.members)


def _eligible(run: Run, group: Group) -> None:
    _give_order(run, group)
    (run.eligible if run.plain(group) else run.apart).add(group, run.versions)


def _not_eligible(run: Run, group: Group) -> None:
    (run.eligible if run.plain(group) else run.apart).remove(group)


def priorities_set(run: Run, priorities: dict[str, float]) -> None:
    for id, priority in priorities.items():
        group = run.groups.get(id)
        if group is not None:
            group.priority = priority
            run.eligible.reweigh(group)

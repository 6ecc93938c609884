"""Attempt leases: grant, renew, hand back.

* A worker gets attempts of its pool only, and only those whose capabilities it offers.
* Runs share a pool evenly: the next slot goes to the run with the fewest leased.
* A run in an outage, or none of whose groups can be used, gets single attempts; so does one whose policy servers have
  no version that could be served.
* While failures may become an outage, groups of which no attempt failed go before those of which all failed.
* While the policy servers are behind the learner, no more groups begin than can be served in time.
* Evaluation goes first up to its share of the pool's slots; beyond it only where training has nothing queued.
* The capacity of a run's policy servers caps its training episodes.
* A grant whose reply was lost is granted again: same worker, same attempt, same nonce.
* A new process under the name of another has none of its attempts: they are lost at once, and the other one stops.
* A heartbeat renews the attempts that it lists; its reply names those of them that are over.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import islice

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.groups import Episode
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.scheduler.state.workers import DEFAULT_TERM_S, WorkerState

HEARTBEATS_A_TERM = 3
"""Heartbeats in a lease's term: two may be lost before the lease runs out."""


def lease(state: SchedulerState, request: messages.LeaseRequest, now: float) -> messages.LeaseReply:
    """Grant up to ``free`` attempts."""
    worker = _hear_from(state, request, now)
    if worker is None:
        return messages.LeaseReply(epoch=state.epoch, cancels=_cancel_all(request.holding or []), drain=True)
    worker.capabilities = frozenset(request.capabilities)
    draining = worker.name in state.workers.draining
    cancels: list[messages.Cancel] = []
    attempts: list[messages.Assignment] = []
    if request.holding is not None:
        cancels, valid = _renew(state, worker, request.holding, now)
        if valid < len(worker.attempts):
            attempts = _grant_again(state, worker, request.holding, request.free, draining, now)
    free = request.free - len(attempts)
    if free > 0 and not draining:
        _grant(state, worker, free, attempts, now)
    return messages.LeaseReply(epoch=state.epoch, attempts=attempts, cancels=cancels, drain=draining)


def _hear_from(
    state: SchedulerState, request: messages.LeaseRequest | messages.HeartbeatRequest, now: float
) -> WorkerState | None:
    """The worker that sent a request; None for a process whose name a later one has."""
    known = state.workers.by_name.get(request.worker)
    if known is not None and request.instance in known.replaced:
        return None
    is_new = known is not None and "" != known.instance != request.instance != ""
    if request.worker in state.workers.draining and (is_new or state.workers.is_gone(request.worker, now)):
        emit(state, events.WorkerDraining(worker=request.worker, over=True), now)
    if known is not None and is_new:
        _lose_all(state, known, now)
        known.take_over(request.instance)
    worker = state.workers.hear_from(request.worker, request.pool, request.slots, now)
    worker.instance = request.instance or worker.instance
    return worker


def _lose_all(state: SchedulerState, worker: WorkerState, now: float) -> None:
    """Decide on the attempts of a process that is gone."""
    changed: dict[str, Run] = {}
    for episode in list(worker.attempts.values()):
        if episode.id in worker.attempts:  # settling for one episode may have ended another
            run = state.run_of(episode)
            changed[run.name] = run
            follow_ups.lose_attempt(state, episode, now)
    for run in changed.values():
        follow_ups.settle(state, run, now)


def _cancel_all(holding: list[messages.AttemptKey]) -> list[messages.Cancel]:
    return [
        messages.Cancel(episode=key.episode, attempt=key.attempt, reason="superseded", record=False) for key in holding
    ]


def heartbeat(state: SchedulerState, request: messages.HeartbeatRequest, now: float) -> messages.HeartbeatReply:
    """Renew the attempts that a worker holds."""
    worker = _hear_from(state, request, now)
    if worker is None:
        cancels = _cancel_all(request.holding)
        interval_s = DEFAULT_TERM_S / HEARTBEATS_A_TERM
        return messages.HeartbeatReply(epoch=state.epoch, interval_s=interval_s, cancels=cancels, drain=True)
    worker.stats = request.stats
    cancels, _ = _renew(state, worker, request.holding, now)
    worker.term_s = min(state.terms.get(worker.pool, {}).values(), default=DEFAULT_TERM_S)
    return messages.HeartbeatReply(
        epoch=state.epoch,
        interval_s=worker.term_s / HEARTBEATS_A_TERM,
        cancels=cancels,
        drain=worker.name in state.workers.draining,
    )


def hand_back(state: SchedulerState, request: messages.ReturnRequest, now: float) -> None:
    """Queue attempts again that a worker will not finish. Attempts that it does not hold any more are ignored."""
    changed: dict[str, Run] = {}
    for key in request.attempts:
        episode = state.episodes.get(key.episode)
        if episode is None or not _is_current(episode, key, request.worker):
            continue
        run = state.run_of(episode)
        changed[run.name] = run
        if episode.state == "leased":
            follow_ups.requeue(state, episode, "handed back", False, None, now)
        elif episode.state == "cancelling":
            follow_ups.end(state, episode, "cancelled", episode.group.reason, "The worker handed it back.", now)
    for run in changed.values():
        follow_ups.settle(state, run, now)


def drain_worker(state: SchedulerState, worker: str, key: str, now: float) -> None:
    """Give the worker no new attempts until it has gone. A repeated request, which has the key of the first one, does
    not drain a later process of the name."""
    if key in state.workers.drain_keys:
        return
    if key or worker not in state.workers.draining:
        emit(state, events.WorkerDraining(worker=worker, key=key), now)


def _is_current(episode: Episode, key: messages.AttemptKey, worker: str) -> bool:
    return episode.attempt == key.attempt and episode.nonce == key.nonce and episode.worker == worker


def _renew(
    state: SchedulerState, worker: WorkerState, holding: list[messages.AttemptKey], now: float
) -> tuple[list[messages.Cancel], int]:
    """Renew the listed attempts; returns those that are to be stopped, and how many the worker validly holds."""
    worker.listed = now
    cancels: list[messages.Cancel] = []
    valid = 0
    find = state.episodes.get
    run, deadline = "", 0.0  # most attempts of a worker are of one run
    for key in holding:
        episode = find(key.episode)
        if episode is None:
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="over", record=False))
        elif episode.attempt != key.attempt or episode.nonce != key.nonce or episode.worker != worker.name:
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="superseded", record=False))
        elif episode.state == "leased":
            valid += 1
            episode.begun = True
            if episode.group.run != run:
                run = episode.group.run
                deadline = now + state.runs[run].spec.attempt_lease_s
            episode.deadline = deadline
        elif episode.state == "cancelling":
            # Not renewed: the wait for a worker that does not stop ends after one term.
            valid += 1
            reason = episode.group.reason
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason=reason, record=True))
        elif episode.state != "queued":
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="over", record=False))
    return cancels, valid


def _grant_again(
    state: SchedulerState,
    worker: WorkerState,
    holding: list[messages.AttemptKey],
    free: int,
    draining: bool,
    now: float,
) -> list[messages.Assignment]:
    """Grant again, unchanged, attempts that never reached the worker, within its free slots; queue the others again."""
    listed = {(key.episode, key.attempt) for key in holding}
    again: list[messages.Assignment] = []
    changed: dict[str, Run] = {}
    for episode in list(worker.attempts.values()):
        if (episode.id, episode.attempt) in listed:
            continue
        run = state.run_of(episode)
        if episode.state == "cancelling":
            follow_ups.end(state, episode, "cancelled", episode.group.reason, "It never reached its worker.", now)
            changed[run.name] = run
        elif draining:
            follow_ups.requeue(state, episode, "its worker drains", False, None, now)
            changed[run.name] = run
        elif len(again) < free:
            episode.deadline = now + run.spec.attempt_lease_s
            again.append(_assignment(run, episode))
        else:
            reason = events.WORKER_LOST if episode.begun else events.NEVER_BEGUN
            follow_ups.requeue(state, episode, reason, False, None, now)
            changed[run.name] = run
    for run in changed.values():
        follow_ups.settle(state, run, now)
    return again


def _grant(
    state: SchedulerState, worker: WorkerState, free: int, attempts: list[messages.Assignment], now: float
) -> None:
    slots = state.workers.slots[worker.pool]
    for run, count in _share(state, worker, free, slots, now):
        run.failure_backoff.count_try(now)
        episodes = _pick(run, count, slots, now)
        nonce = state.new_nonce()  # one for all: it tells this grant of an attempt from any other
        grants = [events.Grant(episode.id, episode.attempt + 1, nonce) for episode in episodes]
        dispatched = events.Dispatched(
            run=run.name,
            worker=worker.name,
            pool=worker.pool,
            version=run.policy_servers.held,
            grants=grants,
            instance=worker.instance,
        )
        emit(state, dispatched, now)
        attempts.extend([_assignment(run, episode) for episode in episodes])
        follow_ups.admit_ahead(state, run, now)


def _backoff_room(run: Run, now: float) -> int:
    return run.failure_backoff.room(run.is_slowed, run.awaited_by_next_try, now)


def _grantable(run: Run, slots: int, free: int, now: float) -> int:
    """Number of queued episodes that may be granted now in a pool with that many slots."""
    return _training_grantable(run, free, now) + _evaluation_grantable(run, slots)


def _training_grantable(run: Run, free: int, now: float) -> int:
    """Number of queued training episodes that may be granted: 0 while the service has not loaded a version whose
    results could be served."""
    if run.outdated and run.policy_servers.target is not None:
        return 0
    room = min(run.queued, run.concurrency_cap.room(run.leased))
    behind = run.versions_behind
    return room if not behind or run.outdated else min(room, _timely(run, behind, min(room, free), now))


def _timely(run: Run, behind: int, most: int, now: float) -> int:
    """Number of episodes at the head of the queue, up to ``most``, whose groups can be served before they go stale,
    although they begin with a version that is ``behind``. Groups are served in the order in which they begin."""
    room = (run.spec.max_staleness + 1 - behind) * run.ledger.batch_groups - run.begun
    if not run.in_progress and run.policy_servers.target is None and run.learner_waits(now):
        room = max(room, 1)  # the servers may stay behind for ever, and the learner may need other groups than those
    timely, begins = 0, set[str]()
    for episode in run.queue:
        group = episode.group
        if timely == most:
            break
        if episode.state != "queued":
            continue
        if group.dispatch_order < 0 and group.position >= 0 and group.id not in begins:
            if len(begins) >= room:
                break
            begins.add(group.id)
        timely += 1
    return timely


def _evaluation_grantable(run: Run, slots: int) -> int:
    """Number of queued evaluation episodes that may be granted: more than their share of the slots only where the
    concurrency cap does not hold training back."""
    if run.queued > run.concurrency_cap.room(run.leased):
        return min(run.evaluation_ready, max(0, _evaluation_share(run, slots) - run.evaluation_leased))
    return run.evaluation_ready


def _evaluation_share(run: Run, slots: int) -> int:
    return math.ceil(run.spec.evaluation_slots * slots)


def _share(state: SchedulerState, worker: WorkerState, free: int, slots: int, now: float) -> list[tuple[Run, int]]:
    """The number of free slots that each run gets, at most its limit: one at a time, to the run with the fewest leased
    episodes. Only as many runs are looked at as get slots, and those before them that may not get any."""
    ready = state.index.ready(worker.pool, state.runs)
    if ready is None:
        return []
    shares: dict[int, int] = {}
    sharing: list[tuple[int, int, int]] = []  # leased, place, room
    following = ready.take()
    while free:
        while following is not None and (not sharing or following < sharing[0]):
            run = ready.runs[following[1]]
            room = _room(run, worker, slots, free, now)
            if run.failure_backoff.since is not None:
                state.index.touched.add(run.name)  # the time of its next try may have been set
            if room > 0:
                heapq.heappush(sharing, (*following, room))
            following = ready.take()
        if not sharing:
            break
        leased, place, room = heapq.heappop(sharing)
        competitors = [entry[0] for entry in sharing[:1]] + ([] if following is None else [following[0]])
        competitor = min(competitors, default=None)
        count = min(free, room) if competitor is None else min(free, room, max(1, competitor - leased))
        shares[place] = shares.get(place, 0) + count
        free -= count
        if room > count:
            heapq.heappush(sharing, (leased + count, place, room - count))
    granted = [(ready.runs[place], count) for place, count in sorted(shares.items())]
    ready.restore()
    return granted


def _room(run: Run, worker: WorkerState, slots: int, free: int, now: float) -> int:
    """Number of episodes of a run that the worker may get now."""
    room = run.spec.max_concurrent - run.leased - run.evaluation_leased
    if room <= 0 or not run.capabilities <= worker.capabilities:
        return 0
    return min(room, _backoff_room(run, now), _grantable(run, slots, free, now))


def _pick(run: Run, count: int, slots: int, now: float) -> list[Episode]:
    """The next ``count`` episodes of a run, of which at least that many may be granted."""
    ready = run.evaluation_ready
    if not ready:
        return _head(run, run.queue, count)
    evaluation = min(count, ready, max(0, _evaluation_share(run, slots) - run.evaluation_leased))
    training = min(count - evaluation, _training_grantable(run, count, now))
    evaluation = count - training
    evaluations = deque(episode for episode in run.evaluation_queue if run.is_ready(episode))
    return _head(run, evaluations, evaluation) + _head(run, run.queue, training)


def _head(run: Run, queue: deque[Episode], count: int) -> list[Episode]:
    queued = (episode for episode in queue if episode.state == "queued")
    if not run.failure_streak.may_become_outage:
        return list(islice(queued, count))
    failed: list[Episode] = []
    head: list[Episode] = []
    for episode in queued:
        if len(head) == count:
            return head
        (failed if episode.group.only_failed else head).append(episode)
    failed.sort(key=_retry_order(run))
    return head + failed[: count - len(head)]


def _retry_order(run: Run) -> Callable[[Episode], int]:
    """The order of episodes whose groups have only failed. If no task is the cause, budgets are spent evenly, so that
    none is used up; else the tasks nearest to their quarantine go first, which makes room for others."""
    if run.failure_streak.causeless:
        return lambda episode: episode.retries_used
    return lambda episode: -episode.group.failed_attempts


def _assignment(run: Run, episode: Episode) -> messages.Assignment:
    group = episode.group
    evaluation = group.evaluation
    return messages.Assignment(
        run=run.name,
        group=group.id,
        member=episode.member,
        episode=episode.id,
        attempt=episode.attempt,
        nonce=episode.nonce,
        task=group.task,
        sampling_seed=episode.sampling_seed,
        term_s=run.spec.attempt_lease_s,
        evaluation=evaluation.id if evaluation is not None else "",
        pinned_version=str(evaluation.version) if evaluation is not None else "",
        temperature=evaluation.temperature if evaluation is not None else None,
        adapters=group.adapters,
    )

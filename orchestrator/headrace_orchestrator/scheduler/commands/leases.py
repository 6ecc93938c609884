"""Attempt leases: granting, renewing, handing back.

* A worker gets attempts of its pool only, and only those whose capabilities it offers.
* Runs share a pool evenly: the next slot goes to the run with the fewest leased.
* A run that only fails, or only goes stale, gets one attempt at a time.
* Evaluation goes first up to its share of the pool's slots; beyond it only where training has nothing queued.
* What the policy servers of a run take at a time caps its training episodes.
* A grant whose reply was lost is granted again: same worker, same attempt, same nonce.
* A heartbeat renews what it lists; it tells the worker what of it is over.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.admission import concurrency_cap, failure_backoff
from headrace_orchestrator.scheduler.state.groups import Episode
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.scheduler.state.workers import Worker

HEARTBEATS_A_TERM = 3
"""Two heartbeats may be lost before a lease runs out."""

DEFAULT_INTERVAL_S = 10.0
"""Seconds between heartbeats where no run has a term for the pool: a third of the default term."""


def lease(state: SchedulerState, request: messages.LeaseRequest, now: float) -> messages.LeaseReply:
    """Grant up to ``free`` attempts."""
    worker = _meet(state, request, now)
    worker.capabilities = frozenset(request.capabilities)
    draining = worker.name in state.workers.draining
    cancels: list[messages.Cancel] = []
    attempts: list[messages.Assignment] = []
    if request.holding is not None:
        cancels, known = _renew(state, worker, request.holding, now)
        if known < len(worker.attempts):
            attempts = _regrant(state, worker, request.holding, request.free, draining, now)
    free = request.free - len(attempts)
    if free > 0 and not draining:
        _grant(state, worker, free, attempts, now)
    return messages.LeaseReply(epoch=state.epoch, attempts=attempts, cancels=cancels, drain=draining)


def _meet(state: SchedulerState, request: messages.LeaseRequest | messages.HeartbeatRequest, now: float) -> Worker:
    if request.worker in state.workers.draining and state.workers.gone(request.worker, now):
        state.emit(events.WorkerDraining(worker=request.worker, over=True), now)
    return state.workers.meet(request.worker, request.pool, request.slots, now)


def heartbeat(state: SchedulerState, request: messages.HeartbeatRequest, now: float) -> messages.HeartbeatReply:
    """Renew what a worker holds."""
    worker = _meet(state, request, now)
    worker.stats = request.stats
    cancels, _ = _renew(state, worker, request.holding, now)
    terms = [run.spec.attempt_lease_s for run in state.pools.get(worker.pool, ()) if not run.closed]
    return messages.HeartbeatReply(
        epoch=state.epoch,
        interval_s=min(terms) / HEARTBEATS_A_TERM if terms else DEFAULT_INTERVAL_S,
        cancels=cancels,
        drain=worker.name in state.workers.draining,
    )


def hand_back(state: SchedulerState, request: messages.ReturnRequest, now: float) -> None:
    """Take back attempts that a worker will not finish. What is not its own any more is passed over."""
    touched: dict[str, Run] = {}
    for key in request.attempts:
        episode = state.episodes.get(key.episode)
        if episode is None or not _is_current(episode, key, request.worker):
            continue
        run = episode.group.run
        touched[run.name] = run
        if episode.state == "leased":
            follow_ups.requeue(state, episode, "handed back", False, None, now)
        elif episode.state == "cancelling":
            follow_ups.end(state, episode, "cancelled", episode.group.reason, "The worker handed it back.", now)
    for run in touched.values():
        follow_ups.settle(state, run, now)


def drain_worker(state: SchedulerState, worker: str, now: float) -> None:
    """Give the worker nothing new, until it has gone."""
    if worker not in state.workers.draining:
        state.emit(events.WorkerDraining(worker=worker), now)


def _is_current(episode: Episode, key: messages.AttemptKey, worker: str) -> bool:
    return episode.attempt == key.attempt and episode.nonce == key.nonce and episode.worker == worker


def _renew(
    state: SchedulerState, worker: Worker, holding: list[messages.AttemptKey], now: float
) -> tuple[list[messages.Cancel], int]:
    """Renew the listed attempts; returns what of it is to be stopped, and how many are held by right."""
    worker.listed = now
    cancels: list[messages.Cancel] = []
    known = 0
    find = state.episodes.get
    for key in holding:
        episode = find(key.episode)
        if episode is None:
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="over", record=False))
        elif episode.attempt != key.attempt or episode.nonce != key.nonce or episode.worker != worker.name:
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="superseded", record=False))
        elif episode.state == "leased":
            known += 1
            episode.deadline = now + episode.group.run.spec.attempt_lease_s
        elif episode.state == "cancelling":
            # Not renewed: a worker that does not stop is not waited for longer than a term.
            known += 1
            reason = episode.group.reason
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason=reason, record=True))
        elif episode.state != "queued":
            cancels.append(messages.Cancel(episode=key.episode, attempt=key.attempt, reason="over", record=False))
    return cancels, known


def _regrant(
    state: SchedulerState, worker: Worker, holding: list[messages.AttemptKey], free: int, draining: bool, now: float
) -> list[messages.Assignment]:
    """What was granted to the worker but never reached it: granted again as it was, within its free slots."""
    held = {(key.episode, key.attempt) for key in holding}
    again: list[messages.Assignment] = []
    touched: dict[str, Run] = {}
    for episode in list(worker.attempts.values()):
        if (episode.id, episode.attempt) in held:
            continue
        run = episode.group.run
        if episode.state == "cancelling":
            follow_ups.end(state, episode, "cancelled", episode.group.reason, "It never reached its worker.", now)
            touched[run.name] = run
        elif draining:
            follow_ups.requeue(state, episode, "its worker drains", False, None, now)
            touched[run.name] = run
        elif len(again) < free:
            episode.deadline = now + run.spec.attempt_lease_s
            again.append(_assignment(run, episode))
    for run in touched.values():
        follow_ups.settle(state, run, now)
    return again


def _grant(state: SchedulerState, worker: Worker, free: int, attempts: list[messages.Assignment], now: float) -> None:
    wanting = [
        run
        for run in state.pools.get(worker.pool, ())
        if (run.queued or run.evaluation_queued)
        and run.leased + run.evaluation_leased < run.spec.max_concurrent
        and run.capabilities <= worker.capabilities
    ]
    slots = state.workers.slots[worker.pool]
    most = [min(failure_backoff.room(run, now), _grantable(run, slots)) for run in wanting]
    for run, count in _share(wanting, most, free):
        if run.failure_backoff.since is not None:
            run.failure_backoff.tried(now)
        episodes = _pick(run, count, slots)
        nonce = state.new_nonce()  # one for all: it tells this grant of an attempt from any other
        grants = [events.Grant(episode.id, episode.attempt + 1, nonce) for episode in episodes]
        state.emit(
            events.Dispatched(
                run=run.name, worker=worker.name, pool=worker.pool, version=run.policy_servers.held, grants=grants
            ),
            now,
        )
        attempts.extend([_assignment(run, episode) for episode in episodes])
        follow_ups.admit_ahead(state, run, now)


def _grantable(run: Run, slots: int) -> int:
    """Queued episodes that may be granted now, of a pool with so many slots."""
    return concurrency_cap.trainable(run) + concurrency_cap.evaluable(run, _evaluation_share(run, slots))


def _evaluation_share(run: Run, slots: int) -> int:
    return math.ceil(run.spec.evaluation_slots * slots)


def _share(wanting: list[Run], most: list[int], free: int) -> list[tuple[Run, int]]:
    """How many of the free slots each run gets; ``most`` is what may be granted of it."""
    room = [
        min(run.spec.max_concurrent - run.leased - run.evaluation_leased, allowed)
        for run, allowed in zip(wanting, most, strict=True)
    ]
    if len(wanting) == 1:
        return [(wanting[0], min(free, room[0]))] if room[0] else []
    leased = [run.leased + run.evaluation_leased for run in wanting]
    given = [0] * len(wanting)
    open_runs = [index for index in range(len(wanting)) if room[index] > 0]
    while free and open_runs:
        index = min(open_runs, key=leased.__getitem__)
        given[index] += 1
        leased[index] += 1
        free -= 1
        if given[index] == room[index]:
            open_runs.remove(index)
    return [(run, count) for run, count in zip(wanting, given, strict=True) if count]


def _pick(run: Run, count: int, slots: int) -> list[Episode]:
    """The next episodes of a run, ``count`` of them; it has that many that may be granted."""
    ready = run.evaluation_ready
    if not ready:
        return _head(run.queue, count)
    evaluation = min(count, ready, max(0, _evaluation_share(run, slots) - run.evaluation_leased))
    training = min(count - evaluation, concurrency_cap.trainable(run))
    evaluation = count - training
    evaluations = deque(episode for episode in run.evaluation_queue if run.is_ready(episode))
    return _head(evaluations, evaluation) + _head(run.queue, training)


def _head(queue: deque[Episode], count: int) -> list[Episode]:
    return list(islice((episode for episode in queue if episode.state == "queued"), count))


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

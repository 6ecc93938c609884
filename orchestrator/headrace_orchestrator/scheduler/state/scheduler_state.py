"""The book: everything that is known, and the one way to change it.

A command decides and calls ``emit``: the record is applied at once and kept for the shell. Replay calls ``apply`` with
the same records in the same order and ends in the same durable state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headrace.errors import InternalError, UnknownRun
from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply import transitions
from headrace_orchestrator.scheduler.state.admission.bounds import Bounds
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import AT_WORKER, Episode
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.workers import Worker, Workers

STALL_SHARE = 1 / 3
"""Share of a lease's term from which on silence of this process counts as a stall: by then a heartbeat was due, and
nobody was there to take it."""


class SchedulerState:
    """All runs, the episodes of their open groups by id, all workers."""

    def __init__(
        self, epoch: int, new_id: Callable[[], str], new_nonce: Callable[[], str], bounds: Bounds | None = None
    ) -> None:
        #: What all runs share; soft.
        self.bounds = bounds if bounds is not None else Bounds()
        self.epoch = epoch
        self.new_id = new_id
        self.new_nonce = new_nonce
        self.runs: dict[str, Run] = {}
        #: Runs that a worker of the pool may work for.
        self.pools: dict[str, list[Run]] = {}
        #: Episodes of the groups that are not complete.
        self.episodes: dict[str, Episode] = {}
        self.workers = Workers()
        #: The shortest term of any lease.
        self.shortest_term_s = math.inf
        self.out: list[events.AnyEvent] = []
        self._take: dict[type, Callable[[Any, float], None]] = {
            events.RunCreated: self._run_created,
            events.RunClosed: self._run_closed,
            events.GroupAdmitted: self._group_admitted,
            events.MemberAdded: self._member_added,
            events.GroupCut: self._group_cut,
            events.Dispatched: self._dispatched,
            events.AttemptEnded: self._attempt_ended,
            events.AttemptCancelled: self._attempt_cancelled,
            events.EpisodeEnded: self._episode_ended,
            events.GroupRetired: self._group_retired,
            events.TaskQuarantined: self._task_quarantined,
            events.BatchFormed: self._batch_formed,
            events.BatchLeased: self._batch_leased,
            events.ShardFetched: self._shard_fetched,
            events.BatchReleased: self._batch_released,
            events.BatchDissolved: self._batch_dissolved,
            events.BatchAcked: self._batch_acked,
            events.VersionAnnounced: self._version_announced,
            events.WeightsLoaded: self._weights_loaded,
            events.ServerAdded: self._server_added,
            events.ServerDrained: self._server_drained,
            events.ServerRemoved: self._server_removed,
            events.SessionStarted: self._session_started,
            events.PrioritiesSet: self._priorities_set,
            events.EvaluationStarted: self._evaluation_started,
            events.EvaluationEnded: self._evaluation_ended,
            events.WorkerDraining: self._worker_draining,
        }

    def run(self, name: str) -> Run:
        """The run of that name; raises UnknownRun."""
        run = self.runs.get(name)
        if run is None:
            raise UnknownRun(f"There is no run named {name!r}.", hint="`headrace runs` lists them.")
        return run

    def emit(self, event: events.AnyEvent, now: float) -> None:
        """Decide: apply an event and keep it for the shell."""
        self._take[type(event)](event, now)
        self.out.append(event)

    def apply(self, event: events.AnyEvent, now: float) -> None:
        """Take an event; raises InternalError for one that does not fit, as where an event before it was lost."""
        try:
            self._take[type(event)](event, now)
        except KeyError as error:
            raise InternalError(f"{type(event).__name__} is about {error}, which is not known here.") from error

    def renew_all(self, now: float) -> None:
        """Give every lease and deadline a full term, as after a restart."""
        for worker in self.workers.by_name.values():
            for episode in worker.attempts.values():
                episode.deadline = now + episode.group.run.spec.attempt_lease_s
        for run in self.runs.values():
            for batch in run.batches.values():
                batch.deadline = now + run.spec.batch_lease_s
            for evaluation in run.active_evaluations.values():
                evaluation.deadline = now + evaluation.deadline_s
                evaluation.asked_at = now
                evaluation.expired = False
            run.waiting.clear()
            for group in run.open_groups.values():
                run.wait_for_rest(group, now)

    def renew_after_stall(self, stall_s: float, now: float) -> None:
        """Give the leases that a stall of this process took a good share of a full term."""
        for worker in self.workers.by_name.values():
            for episode in worker.attempts.values():
                term_s = episode.group.run.spec.attempt_lease_s
                if stall_s > term_s * STALL_SHARE:
                    episode.deadline = now + term_s
        for run in self.runs.values():
            if stall_s > run.spec.batch_lease_s * STALL_SHARE:
                for batch in run.batches.values():
                    batch.deadline = now + run.spec.batch_lease_s
            for group in run.waiting:
                run.waiting[group] += stall_s

    # One method an event ----------------------------------------------------------------------------------------

    def _run_created(self, event: events.RunCreated, now: float) -> None:
        self.add_run(Run(RunSpec.model_validate(event.spec), self.bounds, self.episodes))

    def add_run(self, run: Run) -> None:
        """Know a run from now on."""
        self.runs[run.name] = run
        self.bounds.holders.append(run.ledger)
        self.pools.setdefault(run.spec.pool, []).append(run)
        self.shortest_term_s = min(self.shortest_term_s, run.spec.attempt_lease_s, run.spec.batch_lease_s)

    def _run_closed(self, event: events.RunClosed, now: float) -> None:
        self.runs[event.run].closed = True

    def _group_admitted(self, event: events.GroupAdmitted, now: float) -> None:
        transitions.admitted(self.runs[event.run], event)

    def _member_added(self, event: events.MemberAdded, now: float) -> None:
        transitions.member(self.runs[event.run], event)

    def _group_cut(self, event: events.GroupCut, now: float) -> None:
        run = self.runs[event.run]
        transitions.cut(run, run.groups[event.group])

    def _dispatched(self, event: events.Dispatched, now: float) -> None:
        run = self.runs[event.run]
        worker = self.workers.named(event.worker, event.pool, now)
        deadline = now + run.spec.attempt_lease_s
        episodes = self.episodes
        lost: list[str] = []
        for grant in event.grants:
            episode = episodes.get(grant.episode)
            if episode is None or episode.state != "queued":
                lost.append(grant.episode)
                continue
            transitions.dispatched(run, episode, grant, worker.name, event.version)
            episode.deadline = deadline
            worker.attempts[episode.id] = episode
        transitions.trim_queues(run)
        if len(lost) < len(event.grants):
            self.workers.watch(worker, deadline)
        if lost:
            raise InternalError(f"Dispatched grants episodes that are not queued here: {', '.join(lost)}.")

    def _attempt_ended(self, event: events.AttemptEnded, now: float) -> None:
        episode = self.episodes[event.episode]
        episode.require("queued", event.reason)
        self._holder(episode).attempts.pop(episode.id, None)
        transitions.attempt_ended(self.runs[event.run], episode, event)

    def _attempt_cancelled(self, event: events.AttemptCancelled, now: float) -> None:
        episode = self.episodes[event.episode]
        run = self.runs[event.run]
        episode.require("cancelling", event.reason)
        group = episode.group
        if event.reason == events.PARTIAL and group.state == "open":
            if not group.cut:
                transitions.cut(run, group)
        elif group.state != "retired":
            transitions.retired(run, events.GroupRetired(run=run.name, group=group.id, reason=event.reason))
        episode.move("cancelling", event.reason)
        episode.deadline = now + run.spec.attempt_lease_s
        self.workers.watch(self._holder(episode), episode.deadline)
        transitions.review(run, episode.group)

    def _episode_ended(self, event: events.EpisodeEnded, now: float) -> None:
        episode = self.episodes[event.episode]
        episode.require(event.status, "EpisodeEnded")
        if episode.state in AT_WORKER:
            self._holder(episode).attempts.pop(episode.id, None)
        transitions.episode_ended(self.runs[event.run], episode, event)
        self.runs[event.run].wait_for_rest(episode.group, now)

    def _group_retired(self, event: events.GroupRetired, now: float) -> None:
        transitions.retired(self.runs[event.run], event)

    def _task_quarantined(self, event: events.TaskQuarantined, now: float) -> None:
        transitions.quarantined(self.runs[event.run], event)

    def _batch_formed(self, event: events.BatchFormed, now: float) -> None:
        for episode in transitions.batch_formed(self.runs[event.run], event):
            if episode.attempt:
                self._holder(episode).attempts.pop(episode.id, None)

    def _batch_leased(self, event: events.BatchLeased, now: float) -> None:
        run = self.runs[event.run]
        transitions.batch_leased(run, event)
        run.batches[event.batch].deadline = now + run.spec.batch_lease_s

    def _shard_fetched(self, event: events.ShardFetched, now: float) -> None:
        run = self.runs[event.run]
        batch = run.batches[event.batch]
        batch.fetch(event.generation, event.shard)
        batch.deadline = now + run.spec.batch_lease_s

    def _batch_released(self, event: events.BatchReleased, now: float) -> None:
        batch = self.runs[event.run].batches[event.batch]
        batch.generation = max(batch.generation, event.generation)  # its lease may be lost in the log
        batch.release(event.reason, lapsed=event.reason == events.EXPIRED)

    def _batch_dissolved(self, event: events.BatchDissolved, now: float) -> None:
        transitions.batch_dissolved(self.runs[event.run], event)

    def _batch_acked(self, event: events.BatchAcked, now: float) -> None:
        transitions.batch_acked(self.runs[event.run], event)

    def _version_announced(self, event: events.VersionAnnounced, now: float) -> None:
        self.runs[event.run].announce(event.version, event.fork, event.weights)

    def _weights_loaded(self, event: events.WeightsLoaded, now: float) -> None:
        self.runs[event.run].policy_servers.served(event.version, event.weights)

    def _server_added(self, event: events.ServerAdded, now: float) -> None:
        self.runs[event.run].policy_servers.servers[event.address] = False

    def _server_drained(self, event: events.ServerDrained, now: float) -> None:
        self.runs[event.run].policy_servers.servers[event.address] = True

    def _server_removed(self, event: events.ServerRemoved, now: float) -> None:
        self.runs[event.run].policy_servers.servers.pop(event.address, None)

    def _session_started(self, event: events.SessionStarted, now: float) -> None:
        transitions.session_now(self.runs[event.run], event.learner, event.session)

    def _priorities_set(self, event: events.PrioritiesSet, now: float) -> None:
        transitions.priorities_set(self.runs[event.run], event.priorities)

    def _evaluation_started(self, event: events.EvaluationStarted, now: float) -> None:
        transitions.evaluation(
            self.runs[event.run],
            Evaluation(event.evaluation, event.version, event.wanted, event.deadline_s, event.temperature, now),
        )

    def _evaluation_ended(self, event: events.EvaluationEnded, now: float) -> None:
        evaluation = self.runs[event.run].active_evaluations.pop(event.evaluation)
        evaluation.reason = event.reason
        evaluation.groups.clear()

    def _worker_draining(self, event: events.WorkerDraining, now: float) -> None:
        if event.over:
            self.workers.draining.discard(event.worker)
        else:
            self.workers.draining.add(event.worker)
            # Known from now on, so that it is seen to be gone.
            self.workers.named(event.worker, "default", now)

    def _holder(self, episode: Episode) -> Worker:
        return self.workers.by_name[episode.worker]

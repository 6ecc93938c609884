"""The scheduler core: commands in, records and replies out. Pure: no I/O, no clock, no randomness of its own.

* A command leaves the records of what it decided in ``drain()``; they have been applied already.
* A command that raises has changed nothing.
* A tick that comes late expires nothing: after a stall of this process leases get a full term, as after a restart.
* Replaying all records, or restoring a snapshot and replaying those after it, gives the same durable state; every
  lease then has a full term.

The parts: ``states`` (episodes, groups), ``runs`` (the state of a run), ``book`` (all of it; the one way to change it);
``leasing`` and ``judging`` (workers), ``serving``, ``resuming``, ``selection`` and ``announcing`` (learners),
``submitting``, ``prioritizing`` and ``evaluating``; ``hosts``, ``hosting`` and ``capping`` (policy servers);
``settling`` (what follows from what happened); ``why`` and ``views`` (answers); ``check`` (invariants); ``snapshot``
(all of it as bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from headrace.errors import Conflict, InternalError, RunExists
from headrace.runspec import RunSpec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events, snapshot
from headrace_orchestrator.scheduler.commands import batches as serving
from headrace_orchestrator.scheduler.commands import evaluations, follow_ups, leases, policy_servers, priorities
from headrace_orchestrator.scheduler.commands import groups as submitting
from headrace_orchestrator.scheduler.commands import resume as resuming
from headrace_orchestrator.scheduler.commands import versions as announcing
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Plan, Redeliver
from headrace_orchestrator.scheduler.commands.submissions import judge
from headrace_orchestrator.scheduler.events import AnyEvent, EpisodeEnded
from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.queries.invariants import check, durable
from headrace_orchestrator.scheduler.state.admission import concurrency_cap, failure_backoff
from headrace_orchestrator.scheduler.state.admission.bounds import RETRY_S, Bounds
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import STALL_SHARE, SchedulerState

__all__ = ["Form", "Plan", "Redeliver", "Scheduler"]


class Scheduler:
    """All state of all runs and workers.

    Every command takes ``now`` (monotonic seconds), may raise a ``HeadraceError``, and leaves the records of what it
    decided in ``drain()``; they have been applied already. A command that raises has changed nothing.
    """

    def __init__(
        self, *, epoch: int, new_id: Callable[[], str], new_nonce: Callable[[], str], bounds: Bounds | None = None
    ) -> None:
        self._state = SchedulerState(epoch, new_id, new_nonce, bounds)
        self._replaying = False
        #: When the last command was taken; None until there was one.
        self._last: float | None = None

    # Replay and inspection
    def apply(self, event: AnyEvent, now: float) -> None:
        """Take an event from the log; raises InternalError for one that does not fit, as where an event before it was
        lost. The first command after the last event renews all leases."""
        self._replaying = True
        self._state.apply(event, now)

    def snapshot(self) -> bytes:
        """The durable state, to be restored by a later process; raises InternalError while events are not drained."""
        if self._state.out:
            raise InternalError("A snapshot is asked for while events that it has are not drained yet.")
        return snapshot.snapshot(self._state)

    def restore(self, data: bytes, now: float) -> None:
        """Take a snapshot, into a scheduler that knows nothing yet; events behind it may be applied then. Raises
        CorruptRecord, and has taken nothing. The first command after it renews all leases."""
        if self._state.runs or self._state.workers.by_name:
            raise InternalError("A snapshot is restored into a scheduler that has a state already.")
        snapshot.restore(self._state, data, now)
        self._replaying = True

    @property
    def bounds(self) -> Bounds:
        """What all runs share; whoever has the store says in ``disk_bytes`` what is stored."""
        return self._state.bounds

    def drain(self) -> list[AnyEvent]:
        """The records of the commands since the last call, in order."""
        out, self._state.out = self._state.out, []
        return out

    def tick(self, now: float) -> None:
        """Let time pass: expired attempt leases, batch leases, evaluations, deadlines."""
        state = self._ready(now)
        expired = state.workers.due(now)
        runs: dict[str, Run] = {}
        for episode in expired:
            # Settling for one episode may have ended or cancelled another.
            if episode.state in ("leased", "cancelling") and episode.deadline <= now:
                run = episode.group.run
                runs[run.name] = run
                follow_ups.lease_lost(state, episode, now)
        for run in runs.values():
            follow_ups.settle(state, run, now)
        for run in state.runs.values():
            if run.batches:
                serving.expire(state, run, now)
            if run.active_evaluations:
                evaluations.expire(state, run, now)
            if run.waiting:
                follow_ups.cut_overdue(state, run, now)
            if run.retiring:
                follow_ups.go_on_retiring(state, run, now)
        if state.bounds.exist:
            for run in state.runs.values():
                if run.admits:
                    follow_ups.settle(state, run, now)
        for worker in state.workers.sweep(now):
            state.emit(events.WorkerDraining(worker=worker, over=True), now)

    def next_deadline(self) -> float | None:
        """When ``tick`` wants to be called next at the latest: at a deadline, and while anything is leased often enough
        to tell a quiet time from a stall of this process."""
        attempts = self._state.workers.next_deadline()
        deadlines = [] if attempts is None else [attempts]
        for run in self._state.runs.values():
            deadlines += [batch.deadline for batch in run.batches.values() if batch.leased]
        if deadlines and self._last is not None:
            deadlines.append(self._last + self._state.shortest_term_s * STALL_SHARE / 2)
        for run in self._state.runs.values():
            deadlines += [e.deadline for e in run.active_evaluations.values() if not e.expired]
            deadlines += islice(run.waiting.values(), 1)
            due = failure_backoff.next_try(run)
            if due is not None and (self._last is None or due > self._last):
                deadlines.append(due)
            if self._last is not None and run.retiring:
                deadlines.append(self._last)
            if self._last is not None and run.held_back:
                deadlines.append(self._last + RETRY_S)
        return min(deadlines, default=None)

    def check(self) -> None:
        """Raise AssertionError, with the history, if an invariant does not hold."""
        check(self._state)

    def durable(self) -> dict[str, Any]:
        """The durable state as plain values, without what is soft: equal after a replay of all records."""
        return durable(self._state)

    def _ready(self, now: float) -> SchedulerState:
        state = self._state
        if self._replaying:
            self._replaying = False
            state.renew_all(now)
            follow_ups.settle_after_replay(state, now)
        elif self._last is not None and now - self._last > state.shortest_term_s * STALL_SHARE:
            state.renew_after_stall(now - self._last, now)
        self._last = now
        return state

    # Workers
    def lease(self, request: messages.LeaseRequest, now: float) -> messages.LeaseReply:
        """Grant up to ``request.free`` attempts; renew what the worker holds."""
        return leases.lease(self._ready(now), request, now)

    def heartbeat(self, request: messages.HeartbeatRequest, now: float) -> messages.HeartbeatReply:
        """Renew what the worker holds, and tell it what of it is over."""
        return leases.heartbeat(self._ready(now), request, now)

    def hand_back(self, request: messages.ReturnRequest, now: float) -> None:
        """Queue again what a worker will not finish; draws no retry budget."""
        leases.hand_back(self._ready(now), request, now)

    def judge(self, worker: str, nonce: str, outcome: EpisodeEnded, now: float) -> messages.SubmitVerdict:
        """Decide on a valid submission. Only on ``accepted`` does the shell store the record.

        Rows may carry versions that were announced, or the next ``n`` of their lineage; else VersionUnknown is raised.
        """
        return judge(self._ready(now), worker, nonce, outcome, now)

    def drain_worker(self, worker: str, now: float) -> None:
        """Give the worker nothing new, until it has gone."""
        state = self._ready(now)
        if worker not in state.workers.draining:
            state.emit(events.WorkerDraining(worker=worker), now)

    # Runs
    def create_run(self, spec: RunSpec, now: float) -> None:
        """Make a run; raises RunExists."""
        state = self._ready(now)
        if spec.name in state.runs:
            raise RunExists(f"A run named {spec.name!r} exists.", hint="Give the new run another name.")
        state.emit(events.RunCreated(run=spec.name, spec=spec.model_dump(mode="json")), now)
        follow_ups.settle(state, state.runs[spec.name], now)

    def close_run(self, run: str, now: float) -> None:
        """End a run for good; leased batches may still be acked. Closing it again changes nothing."""
        state = self._ready(now)
        closing = state.run(run)
        if not closing.closed:
            state.emit(events.RunClosed(run=run), now)
            follow_ups.settle(state, closing, now)

    def dissolve(self, run: str, batch: str, reason: str, now: float, *, answering: int = 0) -> None:
        """Give an open batch up, leased or not, as where its stored body is damaged (reason ``damaged``).
        ``answering``: how many pulls are being answered with it now, which can still be answered with another one.

        Its groups are eligible again, but for those out of bound, which retire: read ``groups`` before evicting the
        damaged ones. Raises UnknownBatch; BatchAlreadyAcked where it was acked. One that was dissolved stays so.
        """
        state = self._ready(now)
        serving.dissolve(state, state.run(run), batch, reason, now, answering)

    def submit_groups(self, run: str, groups: list[messages.GroupRequest], now: float) -> list[str]:
        """Admit groups that the learner wants, all or none; returns their ids."""
        state = self._ready(now)
        return submitting.submit(state, state.run(run), groups, now)

    def evict(self, run: str, group: str, now: float) -> None:
        """Retire a group whose stored records were lost, so that it is not planned again."""
        state = self._ready(now)
        follow_ups.evict(state, state.run(run), group, now)

    def start_evaluation(self, run: str, request: messages.EvaluationRequest, now: float) -> str:
        """Admit the episodes of an evaluation; returns its id."""
        state = self._ready(now)
        evaluated = state.run(run)
        if evaluated.closed:
            raise Conflict(f"Run {run} was closed.")
        return evaluations.start(state, evaluated, request, now)

    def evaluation(self, run: str, evaluation: str, now: float) -> messages.EvaluationReply:
        """How far an evaluation is."""
        return evaluations.report(self._state, self._state.run(run), evaluation, now)

    def sync_hold(self, run: str, now: float) -> tuple[float, list[str]]:
        """Seconds that a weight sync still has to wait for evaluations, and which."""
        return evaluations.sync_hold(self._state.run(run), now)

    # Learners
    def pull(self, run: str, request: messages.PullRequest, now: float) -> Plan:
        """A batch, a plan to form one, or why there is none."""
        state = self._ready(now)
        return serving.pull(state, state.run(run), request, now)

    def form(self, run: str, plan: Form, request: messages.PullRequest, now: float) -> Redeliver:
        """Freeze a planned batch and lease it."""
        state = self._ready(now)
        return serving.form(state, state.run(run), plan, request, now)

    def ack(self, run: str, batch: str, request: messages.AckRequest, now: float) -> messages.AckReply:
        """Count a use of the batch's groups, and announce the version that the step made."""
        state = self._ready(now)
        return serving.ack(state, state.run(run), batch, request, now)

    def nack(self, run: str, batch: str, request: messages.NackRequest, now: float) -> None:
        """Take a batch back, to be redelivered."""
        state = self._ready(now)
        serving.nack(state, state.run(run), batch, request, now)

    def resume(self, run: str, request: messages.ResumeRequest, now: float) -> messages.ResumeReply:
        """Lease to a new session of a learner what its earlier ones left unacked."""
        state = self._ready(now)
        return resuming.resume(state, state.run(run), request, now)

    def announce(self, run: str, request: messages.VersionRequest, now: float) -> messages.VersionReply:
        """Take a new version of the lineage now."""
        state = self._ready(now)
        announcing.announce(state, state.run(run), request.version, request.weights, now)
        return messages.VersionReply(epoch=state.epoch, version=str(state.run(run).versions.now))

    def rewind(self, run: str, request: messages.RewindRequest, now: float) -> messages.VersionReply:
        """Open a new lineage that forks from an earlier version."""
        state = self._ready(now)
        announcing.rewind(state, state.run(run), request.version, now)
        return messages.VersionReply(epoch=state.epoch, version=str(state.run(run).versions.now))

    # Policy servers
    def add_server(self, run: str, address: str, now: float) -> None:
        """Give the run a policy server, or end the drain of one."""
        state = self._ready(now)
        policy_servers.add(state, state.run(run), address, now)

    def drain_server(self, run: str, address: str, now: float) -> None:
        """Let a policy server of the run finish what it has; raises UnknownServer."""
        state = self._ready(now)
        policy_servers.drain(state, state.run(run), address, now)

    def remove_server(self, run: str, address: str, now: float) -> None:
        """Take a policy server from the run; raises UnknownServer."""
        state = self._ready(now)
        policy_servers.remove(state, state.run(run), address, now)

    def weights_served(self, run: str, version: Version, weights: messages.Weights, now: float) -> None:
        """A policy server takes requests with this version."""
        state = self._ready(now)
        policy_servers.served(state, state.run(run), version, weights, now)

    def set_inference_slots(self, run: str, slots: int | None) -> bool:
        """How many training episodes the run's policy servers take at a time; None where nobody knows. Soft. Returns
        whether there is more room than before."""
        return concurrency_cap.set_slots(self._state.run(run), slots)

    def tell_servers(self, run: str, told: list[messages.Reason]) -> None:
        """What the run's policy servers are at, in words for those whose pull waits. Soft."""
        policy_servers.tell(self._state.run(run), told)

    def leased(self, run: str) -> int:
        """The run's training episodes at workers."""
        return self._state.run(run).leased

    def adapters_in_use(self, run: str) -> set[str]:
        """The frozen adapters that the run's open groups play with."""
        groups = self._state.run(run).open_groups.values()
        return {adapter for group in groups for adapter in group.adapters.values()}

    def policy_servers(self, run: str) -> PolicyServersState:
        """The run's policy servers and weights; to be read only."""
        return self._state.run(run).policy_servers

    def set_priorities(self, run: str, request: messages.PrioritiesRequest, now: float) -> messages.PrioritiesReply:
        """Set what a prioritized draw goes by."""
        state = self._ready(now)
        return priorities.set_priorities(state, state.run(run), request, now)

    def doing(self, run: str, request: messages.DoingRequest, now: float) -> None:
        """A learner says what it is doing; its batch leases are renewed."""
        serving.doing(self._ready(now).run(run), request, now)

    # Views
    def run_status(self, run: str, now: float) -> messages.RunStatus:
        """One run, as pages show it."""
        return views.run_status(self._state, self._state.run(run), now)

    def run_names(self) -> list[str]:
        """All runs, closed ones included, oldest first."""
        return list(self._state.runs)

    def worker_statuses(self, now: float) -> list[messages.WorkerStatus]:
        """All workers heard of of late, or holding attempts."""
        return views.worker_statuses(self._state, now)

    def closed(self, run: str) -> bool:
        """Whether the run was closed."""
        return self._state.run(run).closed

    def over(self, run: str) -> bool:
        """Whether nothing will ever be served of the run any more."""
        found = self._state.run(run)
        return found.closed or found.done

    def version(self, run: str) -> Version:
        """The run's version now."""
        return self._state.run(run).versions.now

    def spec(self, run: str) -> RunSpec:
        """The run's spec."""
        return self._state.run(run).spec

    def groups(self, run: str) -> list[dict[str, Any]]:
        """The oldest groups in flight, for pages: id, state, task, members with their states, low version."""
        return views.groups(self._state.run(run))

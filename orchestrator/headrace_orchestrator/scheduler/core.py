"""The scheduler core: commands change the state by events. Pure: no I/O, no clock, no randomness of its own.

* The events of a command are in ``drain()``; they have been applied already.
* A command that raises has changed nothing.
* A tick that comes late expires nothing: after a stall of this process leases get a full term, as after a restart.
* Replaying all events, or restoring a snapshot and replaying those after it, gives the same durable state; every
  lease then has a full term.

A command is a function in ``commands`` of the state from ``state_at``, its own arguments, and ``now`` (monotonic
seconds); it may raise a ``HeadraceError``. A query is a function in ``queries`` of the ``state``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from headrace.errors import InternalError
from headrace_orchestrator.scheduler import events, snapshot
from headrace_orchestrator.scheduler.apply.transition_table import apply, emit
from headrace_orchestrator.scheduler.commands import batches, evaluations, follow_ups
from headrace_orchestrator.scheduler.events import AnyEvent
from headrace_orchestrator.scheduler.state.admission.bounds import RETRY_S, SharedBounds
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import STALL_SHARE, SchedulerState


class Scheduler:
    """The state of all runs and workers at a time."""

    def __init__(
        self, *, epoch: int, new_id: Callable[[], str], new_nonce: Callable[[], str], bounds: SharedBounds | None = None
    ) -> None:
        #: For queries; a command takes it from ``state_at``.
        self.state = SchedulerState(epoch, new_id, new_nonce, bounds)
        self._replaying = False
        #: Time of the last command or tick; None before the first.
        self._last: float | None = None

    # Replay and inspection
    def apply(self, event: AnyEvent, now: float) -> None:
        """Apply an event of the log. Raises InternalError for one that does not fit, as after a lost event. The first
        command after the last event renews all leases."""
        self._replaying = True
        apply(self.state, event, now)

    def snapshot(self) -> bytes:
        """The durable state as bytes, for a later process. Raises InternalError while events are not drained."""
        if self.state.undrained:
            raise InternalError("A snapshot needs all events to be drained first.")
        return snapshot.snapshot(self.state)

    def restore(self, data: bytes, now: float) -> None:
        """Restore a snapshot into a new scheduler; later events may be applied then. Raises CorruptRecord, and has
        changed nothing. The first command after it renews all leases."""
        if self.state.runs or self.state.workers.by_name:
            raise InternalError("A snapshot can be restored only into a new scheduler.")
        snapshot.restore(self.state, data, now)
        self._replaying = True

    @property
    def bounds(self) -> SharedBounds:
        """The bounds that all runs share. The owner of the store keeps ``disk_bytes`` up to date."""
        return self.state.bounds

    def drain(self) -> list[AnyEvent]:
        """The events of the commands since the last call, in order."""
        drained, self.state.undrained = self.state.undrained, []
        return drained

    def tick(self, now: float) -> None:
        """Let time pass: expire attempt leases, batch leases, evaluations and deadlines."""
        state = self.state_at(now)
        expired = state.workers.expired(now)
        runs: dict[str, Run] = {}
        for episode in expired:
            # Settling for one episode may have ended or cancelled another.
            if episode.state in ("leased", "cancelling") and episode.deadline <= now:
                run = state.run_of(episode)
                runs[run.name] = run
                follow_ups.lose_attempt(state, episode, now)
        for run in runs.values():
            follow_ups.settle(state, run, now)
        for run in state.runs.values():
            if run.batches:
                batches.expire(state, run, now)
            if run.active_evaluations:
                evaluations.expire(state, run, now)
            if run.cut_deadlines:
                follow_ups.cut_overdue(state, run, now)
            if run.retiring:
                follow_ups.retire_next_slice(state, run, now)
        if state.bounds.exist:
            for run in state.runs.values():
                if run.admits:
                    follow_ups.settle(state, run, now)
        for worker in state.workers.sweep(now):
            emit(state, events.WorkerDraining(worker=worker, over=True), now)

    def next_deadline(self) -> float | None:
        """Latest time of the next ``tick``: the next deadline, or earlier while anything is leased, so that a quiet
        time differs from a stall of this process."""
        state = self.state
        state.index.refresh(state.runs, self._deadline_of)
        attempts, first = state.workers.next_deadline(), self._first_of_runs()
        deadlines = [deadline for deadline in (attempts, first) if deadline is not None]
        if self._last is not None and (attempts is not None or state.index.deadlines.leasing):
            deadlines.append(self._last + state.shortest_term_s * STALL_SHARE / 2)
        return min(deadlines, default=None)

    def _first_of_runs(self) -> float | None:
        """The first deadline of any run. Those that have passed are looked at again: their run may have a later one."""
        state, seen = self.state, set[str]()
        while (found := state.index.deadlines.first()) is not None:
            deadline, name = found
            if self._last is None or deadline > self._last or name in seen:
                return deadline
            seen.add(name)
            state.index.deadlines.place(state.runs[name], self._deadline_of(state.runs[name]))
        return None

    def _deadline_of(self, run: Run) -> float | None:
        """The next deadline of a run."""
        deadlines = [batch.deadline for batch in run.batches.values() if batch.leased]
        deadlines += [e.deadline for e in run.active_evaluations.values() if not e.expired]
        deadlines += islice(run.cut_deadlines.values(), 1)
        if run.failure_backoff.since is not None:
            due = run.failure_backoff.deadline(run.queued + run.evaluation_queued, run.awaited_by_next_try)
            if due is not None and (self._last is None or due > self._last):
                deadlines.append(due)
        if self._last is not None and run.retiring:
            deadlines.append(self._last)
        if self._last is not None and run.held_back:
            deadlines.append(self._last + RETRY_S)
        return min(deadlines, default=None)

    def state_at(self, now: float) -> SchedulerState:
        """The state for a command. The first one after a replay renews all leases; one after a stall, those that lost a
        good share of their term."""
        state = self.state
        if self._replaying:
            self._replaying = False
            state.renew_all(now)
            follow_ups.settle_after_replay(state, now)
        elif self._last is not None and now - self._last > state.shortest_term_s * STALL_SHARE:
            state.renew_after_stall(now - self._last, now)
        self._last = now
        return state

"""The whole state of the scheduler. The transitions in ``apply`` change it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headrace.errors import UnknownRun
from headrace.runspec import RunSpec
from headrace.spec_bounds import STORED
from headrace_orchestrator.scheduler.events import AnyEvent
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.scheduler.state.groups import Episode
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.run_index import RunIndex
from headrace_orchestrator.scheduler.state.workers import Workers, WorkerState

STALL_SHARE = 1 / 3
"""Share of a lease's term from which on silence of this process counts as a stall: by then a heartbeat was due, and was
not received."""


def stored_run(state: SchedulerState, spec: dict[str, Any]) -> Run:
    """The run of a spec that was accepted before."""
    return Run(RunSpec.model_validate(spec, context=STORED), state.bounds, state.episodes, spec)


class SchedulerState:
    """All runs, the episodes of their open groups by id, all workers."""

    def __init__(
        self, epoch: int, new_id: Callable[[], str], new_nonce: Callable[[], str], bounds: SharedBounds | None = None
    ) -> None:
        #: Soft.
        self.bounds = bounds if bounds is not None else SharedBounds()
        self.epoch = epoch
        self.new_id = new_id
        self.new_nonce = new_nonce
        self.runs: dict[str, Run] = {}
        #: Soft: the run that the event being emitted creates, where it was built before.
        self.prepared: Run | None = None
        #: Soft.
        self.index = RunIndex()
        #: Lease terms of the runs that are not closed, by the pool whose workers may work for them.
        self.terms: dict[str, dict[str, float]] = {}
        #: Episodes of the groups that are not complete.
        self.episodes: dict[str, Episode] = {}
        self.workers = Workers()
        #: The shortest term of any lease.
        self.shortest_term_s = math.inf
        #: Events of commands that the shell has not taken yet.
        self.undrained: list[AnyEvent] = []

    def run(self, name: str) -> Run:
        """The run of that name; raises UnknownRun."""
        run = self.runs.get(name)
        if run is None:
            raise UnknownRun(f"No run is named {name!r}.", hint="`headrace runs` lists them.")
        return run

    def add_run(self, run: Run) -> None:
        """Add a run."""
        self.runs[run.name] = run
        self.bounds.holders.append(run.ledger)
        self.index.add(run)
        if not run.closed:
            self.terms.setdefault(run.spec.pool, {})[run.name] = run.spec.attempt_lease_s
        self.shortest_term_s = min(self.shortest_term_s, run.spec.attempt_lease_s, run.spec.batch_lease_s)

    def run_of(self, episode: Episode) -> Run:
        """The run that an episode belongs to."""
        return self.runs[episode.group.run]

    def holder_of(self, episode: Episode) -> WorkerState:
        """The worker of the episode's latest attempt."""
        return self.workers.by_name[episode.worker]

    def renew_all(self, now: float) -> None:
        """Renew the full term of every lease and deadline, as after a restart."""
        for worker in self.workers.by_name.values():
            for episode in worker.attempts.values():
                episode.deadline = now + self.run_of(episode).spec.attempt_lease_s
        for run in self.runs.values():
            for batch in run.batches.values():
                batch.deadline = now + run.spec.batch_lease_s
            for evaluation in run.active_evaluations.values():
                evaluation.deadline = now + evaluation.deadline_s
                evaluation.reported_at = now
                evaluation.expired = False
            run.lost_attempts.clear()
            run.cut_deadlines.clear()
            for group in run.open_groups.values():
                run.set_cut_deadline(group, now)

    def renew_after_stall(self, stall_s: float, now: float) -> None:
        """Renew the leases that lost more than ``STALL_SHARE`` of their term to a stall of this process."""
        for worker in self.workers.by_name.values():
            for episode in worker.attempts.values():
                term_s = self.run_of(episode).spec.attempt_lease_s
                if stall_s > term_s * STALL_SHARE:
                    episode.deadline = now + term_s
        for run in self.runs.values():
            if stall_s > run.spec.batch_lease_s * STALL_SHARE:
                for batch in run.batches.values():
                    batch.deadline = now + run.spec.batch_lease_s
            for group in run.cut_deadlines:
                run.cut_deadlines[group] += stall_s

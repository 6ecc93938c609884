"""Commands that create and close runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.errors import RunExists
from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


class PreparedRun(NamedTuple):
    """A run that is not created yet, and its spec as plain values."""

    run: Run
    plain_spec: dict[str, Any]

    @property
    def name(self) -> str:
        return self.run.name


def prepare(state: SchedulerState, spec: RunSpec) -> PreparedRun:
    """Build a run. It changes nothing and may be done in a thread: a large spec takes long."""
    plain = spec.model_dump(mode="json")
    return PreparedRun(Run(spec, state.bounds, state.episodes, plain), plain)


def create_run(state: SchedulerState, prepared: PreparedRun, now: float) -> None:
    """Create a run; raises RunExists."""
    name = prepared.name
    if name in state.runs:
        raise RunExists(f"A run named {name!r} exists.", hint="Give the new run another name.")
    state.prepared = prepared.run
    emit(state, events.RunCreated(run=name, spec=prepared.plain_spec), now)
    follow_ups.settle(state, state.runs[name], now)


def close_run(state: SchedulerState, run: Run, now: float) -> None:
    """End a run for good; leased batches may still be acked. Closing it again changes nothing."""
    if not run.closed:
        emit(state, events.RunClosed(run=run.name), now)
        follow_ups.settle(state, run, now)

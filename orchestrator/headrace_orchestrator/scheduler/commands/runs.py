"""Commands that create and close runs."""

from __future__ import annotations

from headrace.errors import RunExists
from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def create_run(state: SchedulerState, spec: RunSpec, now: float) -> None:
    """Create a run; raises RunExists."""
    if spec.name in state.runs:
        raise RunExists(f"A run named {spec.name!r} exists.", hint="Give the new run another name.")
    emit(state, events.RunCreated(run=spec.name, spec=spec.model_dump(mode="json")), now)
    follow_ups.settle(state, state.runs[spec.name], now)


def close_run(state: SchedulerState, run: Run, now: float) -> None:
    """End a run for good; leased batches may still be acked. Closing it again changes nothing."""
    if not run.closed:
        emit(state, events.RunClosed(run=run.name), now)
        follow_ups.settle(state, run, now)

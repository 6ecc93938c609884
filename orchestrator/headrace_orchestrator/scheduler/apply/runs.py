"""Transitions of runs: their versions, policy servers and evaluations.

* An evaluation that runs is never forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.run import (
    REMEMBERED_EVALUATIONS,
    REMEMBERED_LINES,
    REMEMBERED_REWINDS,
    remember,
)
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState, stored_run


def run_created(state: SchedulerState, event: events.RunCreated, now: float) -> None:
    run, state.prepared = state.prepared, None
    state.add_run(run or stored_run(state, event.spec))


def run_closed(state: SchedulerState, event: events.RunClosed, now: float) -> None:
    run = state.runs[event.run]
    run.closed = True
    state.terms[run.spec.pool].pop(run.name, None)


def version_announced(state: SchedulerState, event: events.VersionAnnounced, now: float) -> None:
    run = state.runs[event.run]
    run.announce(event.version, event.fork, event.weights)
    if event.key:
        remember(run.rewinds, event.key, event.version, REMEMBERED_REWINDS)


def weights_loaded(state: SchedulerState, event: events.WeightsLoaded, now: float) -> None:
    state.runs[event.run].policy_servers.set_served(event.version, event.weights)


def server_added(state: SchedulerState, event: events.ServerAdded, now: float) -> None:
    state.runs[event.run].policy_servers.servers[event.address] = False


def server_drained(state: SchedulerState, event: events.ServerDrained, now: float) -> None:
    state.runs[event.run].policy_servers.servers[event.address] = True


def server_removed(state: SchedulerState, event: events.ServerRemoved, now: float) -> None:
    state.runs[event.run].policy_servers.servers.pop(event.address, None)


def evaluation_started(state: SchedulerState, event: events.EvaluationStarted, now: float) -> None:
    run = state.runs[event.run]
    evaluation = Evaluation(event.evaluation, event.version, event.wanted, event.deadline_s, event.temperature, now)
    run.evaluations[evaluation.id] = evaluation
    lines = sum(other.wanted for other in run.evaluations.values())
    for old in [other for other in run.evaluations.values() if other.reason]:
        if len(run.evaluations) <= REMEMBERED_EVALUATIONS and lines <= REMEMBERED_LINES:
            break
        del run.evaluations[old.id]
        lines -= old.wanted
    run.active_evaluations[evaluation.id] = evaluation


def evaluation_ended(state: SchedulerState, event: events.EvaluationEnded, now: float) -> None:
    evaluation = state.runs[event.run].active_evaluations.pop(event.evaluation)
    evaluation.reason = event.reason
    evaluation.groups.clear()


TRANSITIONS: dict[type[events.Event], Callable[..., None]] = {
    events.RunCreated: run_created,
    events.RunClosed: run_closed,
    events.VersionAnnounced: version_announced,
    events.WeightsLoaded: weights_loaded,
    events.ServerAdded: server_added,
    events.ServerDrained: server_drained,
    events.ServerRemoved: server_removed,
    events.EvaluationStarted: evaluation_started,
    events.EvaluationEnded: evaluation_ended,
}

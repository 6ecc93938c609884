"""Commands that start, report and expire evaluations."""

from __future__ import annotations

from headrace.bounds import MAX_TEMPERATURE, MIN_TEMPERATURE
from headrace.errors import Conflict, InvalidRequest, UnknownEvaluation, VersionUnknown
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.commands.groups import MAX_GROUP_SIZE, MAX_REQUEST_EPISODES, parse_task
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.scheduler.state.versions import parse_version


def start(state: SchedulerState, run: Run, request: messages.EvaluationRequest, now: float) -> str:
    """Admit the groups of an evaluation; returns its id. A request with the key of an earlier one gets its id."""
    if (known := run.evaluations.get(request.key)) is not None:
        _require_repeat(run, known, request)
        return known.id
    if run.closed:
        raise Conflict(f"Run {run.name} was closed.")
    tasks = [parse_task(task, str(index)) for index, task in enumerate(request.tasks)]
    if not tasks or not 1 <= request.episodes_per_task <= MAX_GROUP_SIZE or not request.deadline_s > 0:
        raise InvalidRequest(
            f"An evaluation needs tasks, 1 to {MAX_GROUP_SIZE} episodes of each, and a deadline above 0 seconds."
        )
    if request.temperature is not None and 0 < request.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"The temperature is {request.temperature}; it is 0, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}."
        )
    episodes = len(tasks) * request.episodes_per_task
    if episodes > MAX_REQUEST_EPISODES:
        raise InvalidRequest(f"An evaluation has at most {MAX_REQUEST_EPISODES} episodes; this one has {episodes}.")
    version = parse_version(request.version) if request.version else run.versions.now
    ahead = version.lineage == run.versions.now.lineage and version.n > run.versions.now.n
    if ahead or version.lineage >= len(run.versions.forks) or run.versions.distance(version) is None:
        raise VersionUnknown(
            f"Run {run.name} has no version {version}; the current version is {run.versions.now}.",
            hint="Evaluate the current version, or one that it descends from.",
        )
    id = request.key or state.new_id()
    started = events.EvaluationStarted(
        run=run.name,
        evaluation=id,
        version=version,
        wanted=episodes,
        deadline_s=request.deadline_s,
        temperature=request.temperature,
    )
    emit(state, started, now)
    for task in tasks:
        follow_ups.admit_group(state, run, state.new_id(), task, request.episodes_per_task, now, evaluation=id)
    return id


def _require_repeat(run: Run, known: Evaluation, request: messages.EvaluationRequest) -> None:
    """Raise Conflict if the request is not that for the evaluation."""
    same = (known.wanted, known.temperature) == (len(request.tasks) * request.episodes_per_task, request.temperature)
    if not same or request.version not in ("", str(known.version)):
        raise Conflict(
            f"Run {run.name} has an evaluation {known.id!r} with other tasks or settings.",
            hint="Give each evaluation a key of its own, or none.",
        )


def report(state: SchedulerState, run: Run, id: str, now: float) -> messages.EvaluationReply:
    """The results of an evaluation so far."""
    evaluation = run.evaluations.get(id)
    if evaluation is None:
        raise UnknownEvaluation(f"Run {run.name} has no evaluation {id!r}.")
    evaluation.reported_at = now
    return messages.EvaluationReply(
        epoch=state.epoch,
        evaluation=id,
        version=str(evaluation.version),
        wanted=evaluation.wanted,
        done=evaluation.done,
        finished=bool(evaluation.reason),
        hold_s=_hold_s(run, evaluation, now),
        episodes=list(evaluation.episodes),
    )


def _hold_s(run: Run, evaluation: Evaluation, now: float) -> float:
    """Seconds that a weight sync waits for it; 0 unless its version is served now."""
    return evaluation.hold_s(now) if evaluation.version == run.policy_servers.held else 0.0


def sync_hold(run: Run, now: float) -> tuple[float, list[str]]:
    """Seconds that a weight sync still has to wait, and the evaluations that it waits for."""
    holds = {evaluation.id: _hold_s(run, evaluation, now) for evaluation in run.active_evaluations.values()}
    waiting = [id for id, hold in holds.items() if hold > 0]
    return max(holds.values(), default=0.0), waiting


def expire(state: SchedulerState, run: Run, now: float) -> None:
    """Cancel episodes that are not over at the deadline."""
    for evaluation in list(run.active_evaluations.values()):
        if evaluation.deadline <= now and not evaluation.expired:
            evaluation.expired = True
            for group in run.evaluation_groups(evaluation):
                if group.state == "open":
                    follow_ups.retire(state, group, "deadline", now)
            follow_ups.settle(state, run, now)

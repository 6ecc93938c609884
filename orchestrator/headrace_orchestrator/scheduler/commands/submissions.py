"""Verdicts on submissions. In this order:

=================================================================  ==========================================
the episode is                                                     verdict
=================================================================  ==========================================
not known (its group is complete or over)                          superseded; the store may know better
over, by this very attempt of this worker                          duplicate: the first result stands
over otherwise                                                     superseded
on a newer attempt                                                 superseded
another worker's, or the nonce is wrong                            not-yours
leased, failed retryably, attempts left                            retrying: queued again, at the front
queued after its lease ran out, failed retryably                   retrying: it is queued already
queued after its lease ran out, any other result                   accepted: an outage reruns nothing
cancelling, any result                                             accepted as its one result
leased, any other result                                           accepted
=================================================================  ==========================================

* A trajectory that contradicts its grant (group, task, evaluation, who ran it) is refused.

Rows may carry versions that were announced, or the next one: a learner loads weights before it announces them.
"""

from __future__ import annotations

from headrace.errors import InvalidTrajectory
from headrace.wire import messages
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.events import EpisodeEnded
from headrace_orchestrator.scheduler.state.groups import TERMINAL, Episode
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState


def judge(state: SchedulerState, worker: str, nonce: str, outcome: EpisodeEnded, now: float) -> messages.SubmitVerdict:
    """Decide on a valid submission; raises VersionUnknown, or InvalidTrajectory where it contradicts its grant."""
    episode = state.episodes.get(outcome.episode)
    if episode is None:
        return "superseded"
    mine = episode.attempt == outcome.attempt and episode.nonce == nonce and episode.worker == worker
    if episode.state in TERMINAL:
        return "duplicate" if mine and episode.by_worker else "superseded"
    if outcome.attempt < episode.attempt:
        return "superseded"
    if not mine:
        return "not-yours"
    run = state.runs[episode.group.run]
    _require_fit(run, episode, outcome)
    failure = outcome.failure
    if failure is not None and failure.retryable and outcome.status == "failed" and episode.state != "cancelling":
        if episode.state == "queued":
            return "retrying"
        if follow_ups.has_attempts_left(run, episode):
            follow_ups.requeue(state, episode, f"{failure.layer}/{failure.kind}", True, failure, now)
            follow_ups.settle(state, run, now)
            return "retrying"
    emit(state, outcome, now)
    if outcome.status == "failed":
        follow_ups.quarantine_if_due(state, run, episode.group.task, now)
    if run.undecided or run.active_evaluations or run.admits:
        follow_ups.settle(state, run, now)
    return "accepted"


def _require_fit(run: Run, episode: Episode, outcome: EpisodeEnded) -> None:
    """Raise InvalidTrajectory where a trajectory contradicts its grant, VersionUnknown for rows of unknown versions."""
    group = episode.group
    if outcome.run != run.name or outcome.group != group.id or outcome.member != episode.member:
        raise InvalidTrajectory(
            f"The record of episode {episode.id} says it is member {outcome.member} of group {outcome.group} of run "
            f"{outcome.run}; it was granted as member {episode.member} of group {group.id} of run {run.name}."
        )
    if outcome.task != group.task:
        raise InvalidTrajectory(
            f"The record of episode {episode.id} is of task {outcome.task}; it was granted task {group.task}."
        )
    evaluation = group.evaluation.id if group.evaluation is not None else ""
    if outcome.evaluation != evaluation:
        raise InvalidTrajectory(
            f"The record of episode {episode.id} names evaluation {outcome.evaluation!r}; it was granted for "
            f"{f'evaluation {evaluation}' if evaluation else 'none'}."
        )
    if not outcome.by_worker:
        raise InvalidTrajectory(f"The record of episode {episode.id} names no worker; {episode.worker} ran it.")
    low, high = outcome.low, outcome.high
    for version in (low,) if low == high else (low, high):
        if version is not None:
            run.versions.require_known(version)
            if group.evaluation is not None and version != group.evaluation.version:
                raise InvalidTrajectory(
                    f"Episode {episode.id} belongs to evaluation {evaluation}, pinned to version "
                    f"{group.evaluation.version}, and has a turn of version {version}.",
                    hint="Cancel an evaluation episode whose version is not loaded any more.",
                )

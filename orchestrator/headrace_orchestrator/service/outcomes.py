"""Between stored records and the scheduler's facts.

* The scheduler learns the same from a record when it is submitted and when it is read back.
* A record that the scheduler wrote itself has no segments, and no worker in its provenance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.codec import SegmentHead, TrajectoryHead
from headrace.trajectory import Provenance, StopReason, Timing, Trajectory, Version
from headrace_orchestrator.scheduler.records import EpisodeEnded

SCORED = frozenset({"finished", "truncated"})
"""Statuses whose rewards count; a failure is not a zero."""


def outcome_of(head: Trajectory | TrajectoryHead, size_bytes: int) -> EpisodeEnded:
    """What the scheduler needs to know of a record."""
    turns = 0
    row_tokens: list[int] = []
    versions: list[Version] = []
    trained: dict[str, list[float]] = {}
    for segment in head.segments:
        turns += len(segment.turns)
        if segment.train and segment.turns:
            row_tokens.append(segment.length if isinstance(segment, SegmentHead) else len(segment.token_ids))
            versions += [run.version for run in segment.versions]
            trained[segment.agent] = []
    rewards: dict[str, float] = {}
    if trained and head.status in SCORED:
        for segment in head.segments:
            if segment.agent in trained:
                trained[segment.agent] += [turn.reward for turn in segment.turns]
        rewards = {agent: math.fsum(trained[agent]) for agent in sorted(trained)}
    return EpisodeEnded(
        run=head.run,
        group=head.group,
        member=head.member,
        episode=head.episode,
        attempt=head.attempt,
        task=head.task,
        status=head.status,
        failure=head.failure,
        rewards=rewards,
        low=min(versions, default=None),
        high=max(versions, default=None),
        turns=turns,
        rows=len(row_tokens),
        row_tokens=sum(row_tokens),
        longest_row=max(row_tokens, default=0),
        size_bytes=size_bytes,
        evaluation=head.provenance.evaluation,
        by_worker=bool(head.provenance.worker),
        trajectory=head.id,
    )


def record_of(outcome: EpisodeEnded, *, new_id: Callable[[], str], headrace_version: str) -> Trajectory:
    """The record of an episode that the scheduler ended itself."""
    stop_reason: StopReason = "cancelled" if outcome.status == "cancelled" else "failure"
    return Trajectory(
        id=outcome.trajectory or new_id(),
        run=outcome.run,
        group=outcome.group,
        member=outcome.member,
        episode=outcome.episode,
        attempt=outcome.attempt,
        task=outcome.task,
        status=outcome.status,
        stop_reason=stop_reason,
        failure=outcome.failure,
        segments=[],
        messages=[],
        tokenizer=None,
        assets=[],
        timing=Timing(),
        provenance=Provenance(headrace_version=headrace_version, evaluation=outcome.evaluation),
    )

"""Between stored records and the scheduler's events.

* The scheduler learns the same from a record when it is submitted and when it is read back.
* A record that the scheduler wrote itself has no segments, and no worker in its provenance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.trajectory import Provenance, StopReason, Timing, Trajectory, Version
from headrace.wire.codec import SegmentHead, TrajectoryHead
from headrace_orchestrator.scheduler.events import EpisodeEnded

SCORED = frozenset({"finished", "truncated"})
"""Statuses whose rewards count; a failure is not a zero."""


def event_of(head: Trajectory | TrajectoryHead, size_bytes: int) -> EpisodeEnded:
    """What the scheduler needs to know of a record."""
    turns = rows = row_tokens = longest_row = 0
    low: tuple[int, int] | None = None
    high: tuple[int, int] | None = None
    trained: set[str] = set()
    given: dict[str, list[float]] = {}
    for segment in head.segments:
        turns += len(segment.turns)
        given.setdefault(segment.agent, []).extend([turn.reward for turn in segment.turns])
        if segment.train and segment.turns:
            tokens = segment.length if isinstance(segment, SegmentHead) else len(segment.token_ids)
            rows += 1
            row_tokens += tokens
            longest_row = max(longest_row, tokens)
            trained.add(segment.agent)
            for run in segment.versions:
                version = (run.lineage, run.n)
                low = version if low is None or version < low else low
                high = version if high is None or version > high else high
    rewards = {agent: math.fsum(given[agent]) for agent in sorted(trained)} if head.status in SCORED else {}
    lowest = None if low is None else Version(*low)
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
        low=lowest,
        high=lowest if high is None or high == low else Version(*high),
        turns=turns,
        rows=rows,
        row_tokens=row_tokens,
        longest_row=longest_row,
        size_bytes=size_bytes,
        evaluation=head.provenance.evaluation,
        by_worker=bool(head.provenance.worker),
        trajectory=head.id,
    )


def record_for_event(outcome: EpisodeEnded, *, new_id: Callable[[], str], headrace_version: str) -> Trajectory:
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

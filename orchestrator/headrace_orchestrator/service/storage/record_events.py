"""Conversion between stored records and the scheduler's ``EpisodeEnded`` events.

* A record gives the same event when it is submitted and when it is read back.
* A record that the scheduler wrote itself has no segments, and no worker in its provenance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.reward_precision import reward_error
from headrace.trajectory import Provenance, StopReason, Timing, Trajectory, Version
from headrace.wire.codec import SegmentHead, TrajectoryHead
from headrace_orchestrator.scheduler.events import EpisodeEnded

SCORED = frozenset({"finished", "truncated"})
"""Statuses whose rewards count; a failure does not count as a reward of zero."""


def event_of(head: Trajectory | TrajectoryHead, size_bytes: int) -> EpisodeEnded:
    """The event of a terminal record."""
    turns = rows = row_tokens = longest_row = 0
    low: tuple[int, int] | None = None
    high: tuple[int, int] | None = None
    trained: set[str] = set()
    turn_rewards: dict[str, list[float]] = {}
    for segment in head.segments:
        turns += len(segment.turns)
        turn_rewards.setdefault(segment.agent, []).extend([turn.reward for turn in segment.turns])
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
    rewards: dict[str, float] = {}
    errors: dict[str, float] = {}
    for agent in sorted(trained) if head.status in SCORED else ():
        rewards[agent] = math.fsum(turn_rewards[agent])
        errors[agent] = reward_error(turn_rewards[agent])
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
        reward_errors=errors,
        low=lowest,
        high=lowest if high is None or high == low else Version(*high),
        turns=turns,
        rows=rows,
        row_tokens=row_tokens,
        longest_row=longest_row,
        size_bytes=size_bytes,
        evaluation=head.provenance.evaluation,
        by_worker=bool(head.provenance.worker),
        first_prompt=head.provenance.first_prompt,
        trajectory=head.id,
        servers=head.provenance.endpoints,
    )


def record_for_event(event: EpisodeEnded, *, new_id: Callable[[], str], headrace_version: str) -> Trajectory:
    """The record of an episode that the scheduler itself ended."""
    stop_reason: StopReason = "cancelled" if event.status == "cancelled" else "failure"
    return Trajectory(
        id=event.trajectory or new_id(),
        run=event.run,
        group=event.group,
        member=event.member,
        episode=event.episode,
        attempt=event.attempt,
        task=event.task,
        status=event.status,
        stop_reason=stop_reason,
        failure=event.failure,
        segments=[],
        messages=[],
        tokenizer=None,
        assets=[],
        timing=Timing(),
        provenance=Provenance(headrace_version=headrace_version, evaluation=event.evaluation),
    )

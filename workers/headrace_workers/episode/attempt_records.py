"""Trajectory records of attempts, including attempts that did not start.

* A record names its run, group, episode and attempt as assigned.
* A failed record without segments is always possible, so no attempt ends without one.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from headrace.errors import EpisodeFailure
from headrace.trajectory import (
    Asset,
    Failure,
    Message,
    Provenance,
    Segment,
    Status,
    StopReason,
    Timing,
    Tokenizer,
    Trajectory,
)
from headrace.wire.messages import Assignment


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, with the parts of its record."""

    status: Status
    stop_reason: StopReason
    failure: Failure | None = None
    segments: list[Segment] = []
    messages: list[Message] = []
    infos: list[dict[str, Any]] = []
    assets: list[Asset] = []
    tokenizer: Tokenizer | None = None
    timing: Timing = Timing()
    endpoints: list[str] = []
    environment_version: str = ""
    first_prompt: str = ""
    control_tokens: int = 0


@cache
def headrace_version() -> str:
    """The installed version, read once."""
    return version("headrace")


def record_of(assignment: Assignment, outcome: AttemptOutcome, *, trajectory_id: str, worker: str) -> Trajectory:
    """Make the trajectory of an attempt with this outcome."""
    return Trajectory(
        id=trajectory_id,
        run=assignment.run,
        group=assignment.group,
        member=assignment.member,
        episode=assignment.episode,
        attempt=assignment.attempt,
        task=assignment.task,
        status=outcome.status,
        stop_reason=outcome.stop_reason,
        failure=outcome.failure,
        segments=outcome.segments,
        messages=outcome.messages,
        tokenizer=outcome.tokenizer,
        assets=outcome.assets,
        timing=outcome.timing,
        provenance=Provenance(
            worker=worker,
            endpoints=outcome.endpoints,
            environment_version=outcome.environment_version,
            headrace_version=headrace_version(),
            evaluation=assignment.evaluation,
            sampling_seed=assignment.sampling_seed,
            first_prompt=outcome.first_prompt,
        ),
        infos=outcome.infos,
        control_tokens=outcome.control_tokens,
    )


def failed(error: EpisodeFailure) -> AttemptOutcome:
    """The outcome of an attempt that failed before its first turn."""
    return AttemptOutcome(status="failed", stop_reason="failure", failure=Failure.of(error))

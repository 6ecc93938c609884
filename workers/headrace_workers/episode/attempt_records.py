"""Makes the record of an attempt, also of one that never began.

* A record names its run, group, episode and attempt as they were assigned.
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


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and what is there of it."""

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


@cache
def headrace_version() -> str:
    """The installed version, read once."""
    return version("headrace")


def record_of(assignment: Assignment, outcome: Outcome, *, trajectory_id: str, worker: str) -> Trajectory:
    """The trajectory of an attempt that ended so."""
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
        ),
        infos=outcome.infos,
    )


def failed(error: EpisodeFailure) -> Outcome:
    """The outcome of an attempt that failed with nothing to show."""
    return Outcome(status="failed", stop_reason="failure", failure=Failure.of(error))

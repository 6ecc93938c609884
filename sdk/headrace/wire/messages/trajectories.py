"""Listings of stored trajectories, and the advantages of one."""

from __future__ import annotations

import msgspec

from headrace.trajectory import Failure, Status


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trajectory in a listing."""

    id: str
    run: str
    group: str
    member: int
    episode: str
    attempt: int
    environment: str
    status: Status
    stop_reason: str
    reward: float | None
    """Sum over turns of agents that train; None if the episode failed or was cancelled."""
    turns: int
    row_tokens: int
    size_bytes: int
    low: str = ""
    high: str = ""
    """Lowest and highest version of its rows, in text form."""
    evaluation: str = ""
    failure: Failure | None = None
    age_s: float = 0.0
    """Seconds since it was stored."""


class TrajectoryList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of a listing, newest first. ``next`` is the ``before`` of the next page; empty at the end."""

    epoch: int
    trajectories: list[TrajectorySummary]
    next: str = ""


class SegmentAdvantages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one row in a batch: its segment in the trajectory, and a value for each of its turns.

    ``advantages`` is None with estimator ``none``.
    """

    segment: int
    returns: list[float]
    advantages: list[float] | None = None


class TrajectoryAdvantages(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The advantages of a trajectory in the batch that it was last frozen into."""

    epoch: int
    trajectory: str
    batch: str
    estimator: str
    rows: list[SegmentAdvantages]

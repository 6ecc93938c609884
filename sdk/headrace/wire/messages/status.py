"""The status of the service, its runs and its workers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.wire.messages.batches import Reason


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of a run's groups by state."""

    open: int = 0
    eligible: int = 0
    leased: int = 0
    retired: dict[str, int] = {}
    """Retired groups by reason."""


class TaskShare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Groups of one kind of task: drawn (admitted), and trained on (their first batch was acked). ``kind``:
    ``environment`` or ``tag``. With every order but ``fifo``, kinds that take long may be trained on too rarely."""

    kind: str
    name: str
    drawn: int = 0
    trained: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of a run, as the console and the commands ``runs`` and ``top`` show it."""

    name: str
    state: Literal["active", "finished", "closed"]
    version: str
    spec: dict[str, Any] = {}
    """Only in the status of one run: a list of runs has no specs, which may be large."""
    groups: GroupCounts
    credit: int
    """Groups that may be admitted now."""
    in_flight: int
    """Groups in flight: admitted and not retired."""
    queued: int
    """Episodes waiting for a slot."""
    leased: int
    """Episodes at workers."""
    attainable: int | None = None
    """Training episodes that the policy servers can take at a time, by their metrics; None: no cap."""
    episodes: dict[str, int]
    """Numbers of terminal records by status, without evaluations."""
    batches_acked: int
    batches_open: int
    learner_doing: str
    learner_doing_s: float
    """Seconds since that report; -1 without one."""
    learner_waiting: bool
    """True while a pull waits."""
    learner_heard_s: float = -1.0
    """Seconds since the last request of that learner; -1 without one."""
    learner_silent: bool = False
    """True if it missed its heartbeats, or sent nothing for a batch lease if it promised none."""
    learner_holds: int = 0
    """Batches that it holds unacked."""
    reasons: list[Reason]
    """The reasons why a pull waits, or would wait if it came now."""
    selected: dict[str, int] = {}
    """Effects of the selection rules. Groups put in batches: ``fifo``, ``ready``, ``lifo``, ``uniform``,
    ``prioritized``, by that order; ``awaited``, by id. Of these, ``filtered``: for a pull with environments or tags;
    ``reused``: not for the first time; ``short``: with fewer members than requested; ``partial``: without waiting for
    the other members. ``zero_variance``: groups made eligible although their returns are all equal. ``topped_up``:
    members added. ``prompts_differ``: groups whose members had different first prompts."""
    shares: list[TaskShare] = []
    """Groups drawn and groups trained on, for each environment and tag."""
    mean_reward: float | None = None
    """Mean episode reward of the last 256 terminal records with rewards."""
    quarantined: int = 0
    rowless: int = 0
    """Episodes that finished or were truncated, and have nothing to train on. No batch has them."""
    servers: dict[str, int] = {}
    """Numbers of its policy servers by state."""
    weight_sync: str = ""
    """The progress of the weight sync, or why it fails; empty if neither applies."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of a worker, as the console and ``top`` show it."""

    worker: str
    pool: str
    capabilities: list[str]
    slots: int
    leased: int
    seen_s: float
    """Seconds since its last request."""
    draining: bool
    silent: bool = False
    """True if it sent nothing for a lease term: it has probably ended, and its slots do not count."""
    stats: dict[str, float] = {}


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of the service, for ``/v1/status``."""

    epoch: int
    version: str
    uptime_s: float
    runs: list[RunStatus]
    workers: list[WorkerStatus]
    store: dict[str, float]
    """``log_bytes``, ``trajectories``, ``sync_p50_s``, ..."""

"""Messages of workers: leases, heartbeats, returned attempts and submissions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.trajectory import Task
from headrace.wire.messages.fields import Gauges, Labels


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of an attempt. The nonce is known only to the worker that holds the lease."""

    episode: str
    attempt: int
    nonce: str


MAX_SLOTS = 1 << 20

Slots = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOTS)]
"""Slots of one worker. The bound protects the sum over a pool from one absurd number."""


Instance = Annotated[str, msgspec.Meta(max_length=64)]
"""The id of a worker's process, which tells it from an earlier or a later process of the same name. Empty for workers
that have none: then an earlier process's attempts run until their leases end."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's request for attempts.

    ``holding`` lists all attempts that it has, including finished ones in its spool. It is sent at the worker's start
    and after a lost response, so that the attempts granted in that one are granted again. None: the attempts granted so
    far.
    """

    worker: str
    pool: str = "default"
    capabilities: Labels = []
    slots: Slots
    """All slots of the worker."""
    free: Annotated[int, msgspec.Meta(ge=-(1 << 20), le=1 << 20)]
    """Free slots: at most that many attempts are granted."""
    holding: list[AttemptKey] | None = None
    wait_s: float = 0.0
    instance: Instance = ""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A granted attempt. The worker fetches the run's spec once per run."""

    run: str
    group: str
    member: int
    episode: str
    attempt: int
    nonce: str
    task: Task
    sampling_seed: int
    term_s: float
    evaluation: str = ""
    pinned_version: str = ""
    """Evaluation only: the version that must sample every turn."""
    temperature: float | None = None
    """Evaluation only: replaces the run's."""
    adapters: dict[str, str] = {}
    """The frozen adapter of each agent that has one, by agent; it is the same in all episodes of the group."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An order to stop an attempt.

    ``record``: the worker must submit a ``cancelled`` record, since the attempt has begun; otherwise the orchestrator
    has the episode's record already, or needs none.
    """

    episode: str
    attempt: int
    reason: str
    record: bool


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    attempts: list[Assignment] = []
    cancels: list[Cancel] = []
    drain: bool = False
    """The worker must finish its attempts and take no new ones: it drains, or a later process has its name."""


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The heartbeat of a worker. It renews the leases of all its attempts, including finished ones in its spool."""

    worker: str
    pool: str = "default"
    slots: Slots
    holding: list[AttemptKey] = []
    stats: Gauges = {}
    """Gauges of the worker: ``event_loop_lag_s``, ``spool_bytes``, ``policy_waiting``, ``environment_waiting``; and
    counters since its start: ``control_tokens`` that texts of environments spelled, and for each policy server
    ``policy_requests ADDRESS`` and ``policy_failures ADDRESS``."""
    instance: Instance = ""


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    interval_s: float
    """Seconds until the next heartbeat is due."""
    cancels: list[Cancel] = []
    drain: bool = False


class ReturnRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that shuts down returns attempts it will not finish. No retry budget is drawn."""

    worker: str
    attempts: list[AttemptKey]


class SubmissionHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of one record in a submission; the records' bytes follow in this order.

    ``POST /v1/worker/submit`` has the body ``u32 little-endian length of the JSON | JSON (list of these) | padding
    to 64 bytes | records, each a multiple of 64 bytes long``.
    """

    episode: str
    attempt: int
    nonce: str
    size_bytes: int


SubmitVerdict = Literal["accepted", "duplicate", "retrying", "superseded", "not-yours", "refused", "assets-missing"]
"""accepted: stored on disk. duplicate: already accepted, and the first result is kept. retrying: the failure is
retryable, and the episode is queued again. superseded: a newer attempt exists or the episode is over, so the record is
discarded. not-yours: another worker's attempt, or a wrong nonce. refused: an invalid record. assets-missing: nothing
was stored because assets of the record are not stored; send them and submit the record again. The last four carry the
error in ``problem``."""


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    episode: str
    verdict: SubmitVerdict
    problem: dict[str, Any] | None = None


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    results: list[SubmitResult]

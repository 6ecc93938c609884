"""Events: the scheduler's decisions, in order.

* State changes only by applying an event; commands decide, transitions apply.
* Applying the events of a log in order restores the state, except deadlines: those get a full term.
* Two kinds of event are stored as frames of their own and rebuilt from them: ``EpisodeEnded`` as the trajectory's,
  ``BatchFormed`` as the batch head's. All others are stored as they are.

The name of an event's class is its tag in the log.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.trajectory import Failure, PolicyRef, Status, Task, Version
from headrace.wire.messages import Weights


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events."""


class RunCreated(Event, frozen=True, kw_only=True):
    """A run is created. ``spec`` is stored as plain values."""

    run: str
    spec: dict[str, Any]


class RunClosed(Event, frozen=True, kw_only=True):
    """A run is closed: it admits no more, and its attempts are cancelled. A leased batch may still be acked."""

    run: str


class Member(msgspec.Struct, frozen=True, array_like=True):
    """An episode of a group at its admission."""

    episode: str
    member: int
    sampling_seed: int


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """A group is admitted. ``position`` counts admissions of the run's own source; -1 for submitted groups and
    evaluations. ``evaluation`` names the evaluation that it belongs to, outside the ledger. ``adapters``: its frozen
    adapters, by agent."""

    run: str
    group: str
    task: Task
    policy: PolicyRef
    members: list[Member]
    position: int = -1
    submitted: bool = False
    evaluation: str = ""
    adapters: dict[str, str] = {}


class MemberAdded(Event, frozen=True, kw_only=True):
    """A top-up: a new episode takes the place of one that failed for good. It draws no credit."""

    run: str
    group: str
    member: Member


PARTIAL = "partial"
"""Reason of stopping the members of a group that is served without them."""


class GroupCut(Event, frozen=True, kw_only=True):
    """A group does not wait for its live members any more: they are stopped, and it is served with its true size."""

    run: str
    group: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """An attempt granted to a worker."""

    episode: str
    attempt: int
    nonce: str


class Dispatched(Event, frozen=True, kw_only=True):
    """Attempts of one run are granted to a worker. ``version`` is the one that the policy servers hold at that moment:
    the run's current one, unless the service has not loaded it yet."""

    run: str
    worker: str
    pool: str
    version: Version
    grants: list[Grant]
    instance: str = ""
    """The process of the worker."""


WORKER_LOST = "worker lost"
"""Reason of an attempt that was lost with its worker: the lease ran out and the worker was silent, or another process
has taken its name."""

NEVER_BEGUN = "never begun"
"""Reason of an attempt whose grant did not reach its worker: the worker reported its attempts, and never this one."""


class AttemptEnded(Event, frozen=True, kw_only=True):
    """An attempt ends without a result and the episode is queued again. ``counts``: it draws on the retry budget (a
    retryable failure and an attempt that a live worker dropped do; hand-back, drain, cancellation, the loss of the
    worker and an attempt that nobody began do not). ``reason`` is ``WORKER_LOST`` or ``NEVER_BEGUN`` for the last
    two."""

    run: str
    episode: str
    attempt: int
    reason: str
    counts: bool
    failure: Failure | None = None


class AttemptCancelled(Event, frozen=True, kw_only=True):
    """An attempt is cancelled. The worker's ``cancelled`` trajectory is awaited until the lease ends."""

    run: str
    episode: str
    attempt: int
    reason: str


USABLE: frozenset[Status] = frozenset({"finished", "truncated"})
"""Statuses of trajectories that enter batches if they have rows."""


class EpisodeEnded(Event, frozen=True, kw_only=True):
    """The single result of a dispatched episode. Stored as the trajectory's own frame.

    ``rewards``: the sum of rewards by agent, for agents with rows; ``reward_errors``: their rounding errors.
    ``low``, ``high``: the lowest and highest version of its rows; a missing ``high`` equals ``low``.
    ``servers``: addresses of the policy servers that it used.
    ``row_tokens``: tokens of all rows; ``longest_row``: tokens of the longest. ``size_bytes``: size of the stored
    trajectory. ``by_worker``: a worker submitted it; otherwise the scheduler ended the episode, and the shell stores a
    trajectory without segments.
    """

    run: str
    group: str
    member: int
    episode: str
    attempt: int
    task: Task
    status: Status
    failure: Failure | None = None
    rewards: dict[str, float] = {}
    reward_errors: dict[str, float] = {}
    low: Version | None = None
    high: Version | None = None
    turns: int = 0
    rows: int = 0
    row_tokens: int = 0
    longest_row: int = 0
    size_bytes: int = 0
    evaluation: str = ""
    by_worker: bool = True
    first_prompt: str = ""
    """Fingerprint of its first prompt; empty if unknown."""
    trajectory: str = ""
    """Id of the stored trajectory; empty until the shell assigns one."""
    servers: list[str] = []

    @property
    def is_usable(self) -> bool:
        """True if its trajectory may enter a batch: it did not fail, and has a row."""
        return self.status in USABLE and bool(self.rewards)

    @property
    def is_rowless(self) -> bool:
        """True if it did not fail and has nothing to train on."""
        return self.status in USABLE and not self.rewards


REPLACED = "version-replaced"
"""Reason of stopping the episodes of an evaluation: the version that they are pinned to is not served any more."""


class GroupRetired(Event, frozen=True, kw_only=True):
    """A group is retired. ``reason``: acked, stale, zero-variance, incomplete, no-rows, prompts-differ, row-too-long,
    rejected, evicted, failed, quarantined, rewound, closed; of an evaluation: evaluated, deadline,
    version-replaced."""

    run: str
    group: str
    reason: str


class TaskQuarantined(Event, frozen=True, kw_only=True):
    """Too many attempts of a task failed; it is not dispatched again. ``history`` lists its failures; it is stored as
    ``story``."""

    run: str
    task: Task
    history: list[str] = msgspec.field(name="story")


class BatchFormed(Event, frozen=True, kw_only=True):
    """A batch is frozen. Stored as the batch head's own frame. ``filtered``: the pull asked only for some kinds."""

    run: str
    batch: str
    groups: list[str]
    version: Version
    filtered: bool = False


class BatchLeased(Event, frozen=True, kw_only=True):
    """A batch is leased. ``generation`` counts from 1. ``shards``: ranks that share the lease; ``fetched``: the shards
    that were served with it."""

    run: str
    batch: str
    generation: int
    learner: str
    session: str
    request: str
    shards: int = 1
    fetched: tuple[int, ...] = (0,)


class ShardFetched(Event, frozen=True, kw_only=True):
    """Another shard of a leased batch is served. A lease that ran out is valid again: its holder is active."""

    run: str
    batch: str
    generation: int
    shard: int


EXPIRED = "expired"
"""Reason of the release of a batch whose lease ran out."""


class BatchReleased(Event, frozen=True, kw_only=True):
    """A batch lease ends unacked: expired, nacked, or its learner's session was replaced."""

    run: str
    batch: str
    generation: int
    reason: str


class BatchDissolved(Event, frozen=True, kw_only=True):
    """A batch is dissolved: it is not served again; its groups are eligible, or retire by events of their own.
    ``unseen``: no part of it was delivered, so the pulls that it should have answered get another batch."""

    run: str
    batch: str
    reason: str
    unseen: bool = False


class BatchAcked(Event, frozen=True, kw_only=True):
    """A batch is acked, at most once. ``version``: the one that the step made, announced by this event; None if
    it made none. ``weights``: its weights, if the service loads them."""

    run: str
    batch: str
    generation: int
    version: Version | None = None
    weights: Weights | None = None


class VersionAnnounced(Event, frozen=True, kw_only=True):
    """A version becomes the current one of the run. The first of a new lineage names its fork point. ``weights``: its
    weights, if the service loads them. ``key``: that of the request for a rewind."""

    run: str
    version: Version
    fork: Version | None = None
    weights: Weights | None = None
    key: str = ""


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """The first policy server takes requests with this version."""

    run: str
    version: Version
    weights: Weights


class ServerAdded(Event, frozen=True, kw_only=True):
    """A run gets a policy server beside those of its spec, or the drain of one of its servers ends."""

    run: str
    address: str


class ServerDrained(Event, frozen=True, kw_only=True):
    """A policy server of the run gets no new requests."""

    run: str
    address: str


class ServerRemoved(Event, frozen=True, kw_only=True):
    """A policy server is removed from the run."""

    run: str
    address: str


class SessionStarted(Event, frozen=True, kw_only=True):
    """A learner resumes in a new session; requests of its earlier ones are refused."""

    run: str
    learner: str
    session: str


class PrioritiesSet(Event, frozen=True, kw_only=True):
    """Priorities of groups in prioritized draws from now on."""

    run: str
    priorities: dict[str, float]


class EvaluationStarted(Event, frozen=True, kw_only=True):
    """An evaluation starts. Its groups follow as ``GroupAdmitted`` events."""

    run: str
    evaluation: str
    version: Version
    wanted: int
    deadline_s: float
    temperature: float | None = None


class EvaluationEnded(Event, frozen=True, kw_only=True):
    """All episodes of an evaluation are over. ``reason``: done, deadline, closed, or cancelled before the deadline."""

    run: str
    evaluation: str
    reason: str


class WorkerDraining(Event, frozen=True, kw_only=True):
    """A worker gets no new attempts. ``over``: it is gone, and another process may take its name. ``key``: that of the
    request."""

    worker: str
    over: bool = False
    key: str = ""


AnyEvent = (
    RunCreated
    | RunClosed
    | GroupAdmitted
    | MemberAdded
    | GroupCut
    | Dispatched
    | AttemptEnded
    | AttemptCancelled
    | EpisodeEnded
    | GroupRetired
    | TaskQuarantined
    | BatchFormed
    | BatchLeased
    | ShardFetched
    | BatchReleased
    | BatchDissolved
    | BatchAcked
    | VersionAnnounced
    | WeightsLoaded
    | ServerAdded
    | ServerDrained
    | ServerRemoved
    | SessionStarted
    | PrioritiesSet
    | EvaluationStarted
    | EvaluationEnded
    | WorkerDraining
)
"""The union to which the log decodes stored events."""

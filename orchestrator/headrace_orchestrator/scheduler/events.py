"""Events: what the scheduler decided, in the order it decided it.

* State changes only by applying a record; deciding and applying are apart.
* Applying the records of a log in order gives the state back, but for deadlines: those get a full term.
* Two kinds of event are carried by frames of their own in the log and rebuilt from them: ``EpisodeEnded`` by the
  trajectory's, ``BatchFormed`` by the batch head's. All others are stored as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.trajectory import Failure, PolicyRef, Status, Task, Version
from headrace.wire.messages import Weights


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events."""


class RunCreated(Event, frozen=True, kw_only=True):
    """``spec`` as it was given, JSON-able."""

    run: str
    spec: dict[str, Any]


class RunClosed(Event, frozen=True, kw_only=True):
    """No more admission; attempts are cancelled. A batch that is leased may still be acked."""

    run: str


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One episode of a group at its admission."""

    episode: str
    member: int
    sampling_seed: int


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """A group enters the ledger. ``position`` counts admissions of the run's own source; -1 for submitted groups and
    evaluations. ``evaluation`` names the evaluation it belongs to, outside the ledger. ``adapters``: the frozen ones
    that play in it, by agent."""

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
    """A top-up: a fresh episode in place of one that failed for good. Draws no credit."""

    run: str
    group: str
    member: Member


PARTIAL = "partial"
"""Reason for which members of a group are stopped that is served without them."""


class GroupCut(Event, frozen=True, kw_only=True):
    """The group is waited for no longer: its live members are stopped, and it is served with its true size."""

    run: str
    group: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One attempt given to a worker."""

    episode: str
    attempt: int
    nonce: str


class Dispatched(Event, frozen=True, kw_only=True):
    """Attempts granted to a worker, all of one run. ``version`` is the one that its policy servers hold at that moment:
    the run's, unless the service is yet to load that."""

    run: str
    worker: str
    pool: str
    version: Version
    grants: list[Grant]


WORKER_LOST = "worker lost"
"""Reason of an attempt that went with its worker: the lease ran out and the worker was silent."""


class AttemptEnded(Event, frozen=True, kw_only=True):
    """An attempt ended without a terminal record and the episode is queued again. ``counts``: it drew on the retry
    budget (a retryable failure does, and an attempt that a living worker dropped; hand-back, drain, cancellation and
    the loss of the worker do not). ``reason`` is ``WORKER_LOST`` for the last of these."""

    run: str
    episode: str
    attempt: int
    reason: str
    counts: bool
    failure: Failure | None = None


class AttemptCancelled(Event, frozen=True, kw_only=True):
    """The worker was told to stop; its ``cancelled`` record is awaited until the lease ends."""

    run: str
    episode: str
    attempt: int
    reason: str


class EpisodeEnded(Event, frozen=True, kw_only=True):
    """The one terminal record of a dispatched episode. Carried by the trajectory's own frame.

    ``rewards``: the sum of rewards by agent, for agents with rows. ``low``, ``high``: the lowest and highest
    version of its rows; a missing ``high`` is taken to be ``low``.
    ``row_tokens``: tokens of all rows; ``longest_row``: of the longest. ``size_bytes``: of the stored record.
    ``by_worker``: whether a worker wrote it; otherwise the scheduler did, and the shell stores a record without
    segments.
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
    low: Version | None = None
    high: Version | None = None
    turns: int = 0
    rows: int = 0
    row_tokens: int = 0
    longest_row: int = 0
    size_bytes: int = 0
    evaluation: str = ""
    by_worker: bool = True
    trajectory: str = ""
    """Id of the stored trajectory; empty until the shell has given one."""


REPLACED = "version-replaced"
"""Reason for which episodes of an evaluation are stopped: the version that they are pinned to is served no more."""


class GroupRetired(Event, frozen=True, kw_only=True):
    """A group's last state. ``reason``: acked, stale, zero-variance, incomplete, row-too-long, rejected, evicted,
    failed, rewound, closed; of an evaluation: evaluated, deadline, version-replaced."""

    run: str
    group: str
    reason: str


class TaskQuarantined(Event, frozen=True, kw_only=True):
    """The task killed too many attempts; it is not dispatched again. ``history`` lists its failures, stored as
    ``story``."""

    run: str
    task: Task
    history: list[str] = msgspec.field(name="story")


class BatchFormed(Event, frozen=True, kw_only=True):
    """A batch is frozen. Carried by the batch head's own frame. ``filtered``: the pull asked for some kinds only."""

    run: str
    batch: str
    groups: list[str]
    version: Version
    filtered: bool = False


class BatchLeased(Event, frozen=True, kw_only=True):
    """A batch lease. ``generation`` counts from 1. ``shards``: how many ranks share it; ``fetched``: the shards that
    were served with it."""

    run: str
    batch: str
    generation: int
    learner: str
    session: str
    request: str
    shards: int = 1
    fetched: tuple[int, ...] = (0,)


class ShardFetched(Event, frozen=True, kw_only=True):
    """Another shard of a leased batch was served. A lease that had run out lives again: its holder is there."""

    run: str
    batch: str
    generation: int
    shard: int


EXPIRED = "expired"
"""Reason of a batch lease that ran out."""


class BatchReleased(Event, frozen=True, kw_only=True):
    """A batch lease ended unacked: expired, nacked, or its learner's session was replaced."""

    run: str
    batch: str
    generation: int
    reason: str


class BatchDissolved(Event, frozen=True, kw_only=True):
    """A batch that will not be served again; its groups are eligible, or retire by records of their own. ``unseen``:
    nobody has a part of it, so the pulls that it was to answer are answered with another."""

    run: str
    batch: str
    reason: str
    unseen: bool = False


class BatchAcked(Event, frozen=True, kw_only=True):
    """Acked, at most once. ``version``: what the step made, announced by this very record; None if it made none.
    ``weights``: where it is, if the service is to load it."""

    run: str
    batch: str
    generation: int
    version: Version | None = None
    weights: Weights | None = None


class VersionAnnounced(Event, frozen=True, kw_only=True):
    """The run's version now. A first version of a new lineage names its fork point. ``weights``: where it is, if the
    service is to load it."""

    run: str
    version: Version
    fork: Version | None = None
    weights: Weights | None = None


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """A policy server takes requests with this version, the first one to do so."""

    run: str
    version: Version
    weights: Weights


class ServerAdded(Event, frozen=True, kw_only=True):
    """A policy server of the run beside those of its spec; or one of its servers drains no longer."""

    run: str
    address: str


class ServerDrained(Event, frozen=True, kw_only=True):
    """A policy server of the run takes nothing new."""

    run: str
    address: str


class ServerRemoved(Event, frozen=True, kw_only=True):
    """A policy server is none of the run's any more."""

    run: str
    address: str


class SessionStarted(Event, frozen=True, kw_only=True):
    """A learner resumed in a new session: what its earlier ones asked for is not answered any more."""

    run: str
    learner: str
    session: str


class PrioritiesSet(Event, frozen=True, kw_only=True):
    """What a prioritized draw goes by from now on, by group."""

    run: str
    priorities: dict[str, float]


class EvaluationStarted(Event, frozen=True, kw_only=True):
    """Its groups follow as ``GroupAdmitted`` records."""

    run: str
    evaluation: str
    version: Version
    wanted: int
    deadline_s: float
    temperature: float | None = None


class EvaluationEnded(Event, frozen=True, kw_only=True):
    """All its episodes are over; ``reason``: done, deadline, closed, or cancelled where that came before these."""

    run: str
    evaluation: str
    reason: str


class WorkerDraining(Event, frozen=True, kw_only=True):
    """The worker gets nothing new. ``over``: it has gone, and another process may take its name."""

    worker: str
    over: bool = False


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
"""The union that the log decodes events to."""

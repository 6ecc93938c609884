"""Control messages between the orchestrator, workers and learners: JSON over HTTP.

* Messages hold durations, never absolute times; each is in seconds, and its name ends in ``_s``.
* Every response carries the epoch of the orchestrator, so that the responses of a paused older one are refused.
* Readers ignore unknown fields, so that either side can be newer by one release.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.trajectory import Failure, Status, Task

API = "/v1"
"""Prefix of every route of the service."""

BATCH_MEDIA_TYPE = "application/vnd.headrace.batch"
ASSET_MEDIA_TYPE = "application/octet-stream"
ASSETS_MEDIA_TYPE = "application/vnd.headrace.assets"
RECORDS_MEDIA_TYPE = "application/vnd.headrace.records"
PROBLEM_MEDIA_TYPE = "application/problem+json"

HEADER_EPOCH = "Headrace-Epoch"
HEADER_GENERATION = "Headrace-Generation"
HEADER_LEASE_S = "Headrace-Lease-Seconds"
HEADER_WAIT_S = "Headrace-Wait-Seconds"
"""Header of every response to a long poll: the granted wait."""

MAX_WAIT_S = 60.0
"""Default of the longest long poll that the server grants; a longer ``wait_s`` is shortened to it."""


# Workers ------------------------------------------------------------------------------------------------------


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of an attempt. The nonce is known only to the worker that holds the lease."""

    episode: str
    attempt: int
    nonce: str


Slots = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""Slots of one worker. The bound protects the sum over a pool from one absurd number."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's request for attempts.

    ``holding`` lists all attempts that it has, including finished ones in its spool. It is sent at the worker's start
    and after a lost response, so that the attempts granted in that one are granted again. None: the attempts granted so
    far.
    """

    worker: str
    pool: str = "default"
    capabilities: list[str] = []
    slots: Slots
    """All slots of the worker."""
    free: int
    """Free slots: at most that many attempts are granted."""
    holding: list[AttemptKey] | None = None
    wait_s: float = 0.0


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One granted attempt. The worker fetches the run's spec once per run."""

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
    """The worker must finish its attempts and take no new ones."""


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The heartbeat of a worker. It renews the leases of all its attempts, including finished ones in its spool."""

    worker: str
    pool: str = "default"
    slots: Slots
    holding: list[AttemptKey] = []
    stats: dict[str, float] = {}
    """Gauges of the worker: ``event_loop_lag_s``, ``spool_bytes``, ``policy_waiting``, ``environment_waiting``; and
    counters since its start for each policy server, ``policy_requests ADDRESS`` and ``policy_failures ADDRESS``."""


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
"""accepted: stored on disk. duplicate: already accepted, and the first result stands. retrying: the failure is
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


MAX_ASSET_NAMES = 4096
"""Most names in one request."""


class AssetsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of assets. A worker asks which of them are already stored, before it submits records that refer to them; a
    learner asks for their bytes."""

    names: Annotated[list[str], msgspec.Meta(max_length=MAX_ASSET_NAMES)]


class AssetHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of one asset in the response to ``POST /v1/assets``, or the error in its place.

    The body is ``u32 little-endian length of the JSON | JSON (list of these) | padding to 64 bytes | assets, each
    padded to 64 bytes``. It may hold only the first assets of the request, if all would be too long.
    """

    size_bytes: int = 0
    problem: dict[str, Any] | None = None


class AssetsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``missing``: the assets to send, each with ``PUT /v1/assets/{name}``. The others are kept for ``keep_s`` seconds
    from now, and beyond that while a record refers to them that is submitted within that time."""

    epoch: int
    missing: list[str]
    keep_s: float


# Learners -----------------------------------------------------------------------------------------------------

Doing = Literal["waiting", "training", "evaluating", "checkpointing", "idle"]
"""The activity that a learner reports."""


class PullRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learner's request for a batch.

    ``learner`` is a name that survives its restart, ``session`` one process of it: leases of another session of the
    same learner are released at once. ``request`` makes a retry safe: the same request of a session gets the same batch
    until that is acked. ``groups`` waits for submitted groups by id.

    The ranks of a data-parallel learner share a session. Each asks for its ``shard`` of ``shards``, and uses the same
    request id for its k-th pull as the others, so that it gets its shard of the same batch. ``batch`` asks only for the
    named batch of a ``ResumeReply``.

    ``environments`` and ``tags`` restrict the batch to groups of one of these environments with all of these tags.
    Empty: any. A batch is redelivered to a pull only if all its groups match that pull.
    """

    learner: str
    session: str
    request: str
    wait_s: float = 0.0
    groups: list[str] | None = None
    shard: int = 0
    shards: int = 1
    batch: str = ""
    environments: list[str] = []
    tags: list[str] = []


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why no batch can be served. ``code`` is one of: collecting, no-workers, all-stale, batches-held,
    shards-not-fetched, byte-bound, service-byte-bound, disk-bound, tasks-exhausted, groups-left, group-ended,
    evaluation-hold, quarantined, no-tasks, no-policy-servers, policy-saturated, weight-sync, adapters, draining,
    closed, filtered, zero-variance, row-too-long. A layer that keeps failing has LAYER-failing, such as policy-failing.

    ``group-ended``: an awaited group was retired unserved; ``facts["reason"]`` says why, and ``facts["failure"]`` is
    the last failure of an episode of it, if one failed. ``shards-not-fetched``: a batch is held for ranks that did not
    pull, listed in ``facts["missing"]``. ``filtered``: eligible groups do not match the pull. ``zero-variance``: the
    batch omits groups whose returns are all equal. ``row-too-long``: groups were retired that did not fit into a bin.
    """

    code: str
    message: str
    facts: dict[str, Any] = {}


class EmptyReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a pull without a batch. ``finished``: no batch will follow. ``waited_s``: the server's wait."""

    epoch: int
    reasons: list[Reason]
    finished: bool = False
    waited_s: float = 0.0


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A restarted learner's request for the batches of its earlier sessions. All ranks of the session may ask; the
    batches are leased to it once."""

    learner: str
    session: str
    shards: int = 1


class ResumeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``batches`` that earlier sessions leased and never acked, oldest first; they are now leased to this session, and
    a pull by name fetches one. ``lost``: the reason why a batch is not served to this learner again, by its id."""

    epoch: int
    batches: list[str]
    lost: dict[str, str] = {}


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a version's weights: a path that the policy servers can read.

    ``full``: a folder of safetensors as transformers writes it. ``adapter``: a folder of a LoRA adapter as PEFT writes
    it.
    """

    path: str
    kind: Literal["full", "adapter"] = "full"


class AckRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The acknowledgement of a batch that was trained on.

    ``version`` is the version that the step made, as ``lineage.n``; it is announced in the same log frame. Empty: the
    step made none. ``weights``: the place of its weights, which the service loads into the run's policy servers; None:
    the learner has loaded them itself.
    """

    learner: str
    session: str
    generation: int
    version: str = ""
    weights: Weights | None = None


class AckReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    batch: str
    version: str


class NackRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gives a batch back. It is redelivered whole while it is fresh enough."""

    learner: str
    session: str
    generation: int
    reason: str


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Announces a version: a later ``n`` of the lineage; gaps are skipped versions.

    ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner has
    loaded them itself.
    """

    version: str
    weights: Weights | None = None


class RewindRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Goes back to a checkpoint: opens a new lineage that forks from ``version``."""

    version: str


class VersionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    version: str
    """The current version. After a rewind: ``(new lineage, n of the fork point)``."""


PolicyServerState = Literal["unknown", "serving", "syncing", "draining", "ejected"]
"""unknown: not contacted yet. serving: takes requests. syncing: paused for new weights. draining: finishes its requests
and takes no new ones. ejected: takes no requests until it confirms an expected version."""


class PolicyServerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one policy server of a run.

    ``version``: the last one that it confirmed; empty if none. ``paused_s``: total seconds of its pauses for new
    weights, including a current one. ``running``, ``waiting``: requests in the engine. ``kv_cache_used``: share of its
    KV cache, 0 to 1. ``reason``: why it is not serving.
    """

    address: str
    state: PolicyServerState
    version: str = ""
    paused_s: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv_cache_used: float = 0.0
    reason: str = ""


class PolicyServersReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The policy servers of a run.

    ``revision`` grows whenever a server is added, removed or changes its state or version: a long poll that names the
    last known revision returns at the next. ``sync``: the progress of the weight sync, or why the last one failed;
    empty if neither applies. ``skipped``: the latest versions that a newer one replaced before any server loaded them.
    """

    epoch: int
    revision: int
    servers: list[PolicyServerStatus] = []
    sync: str = ""
    skipped: list[str] = []


class PolicyServerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Adds, drains or removes a policy server of a run. ``address``: as in ``policy.endpoints``."""

    address: str


class DoingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The learner's current activity. It renews all its batch leases."""

    learner: str
    session: str
    doing: Doing


class PrioritiesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Priorities by group id, 1e-6 to 1e6, for prioritized draws from now on. The initial priority of a group is 1."""

    priorities: dict[str, float]


class PrioritiesReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``set``: the number of priorities set. ``over``: the groups that are no longer in flight."""

    epoch: int
    set: int
    over: list[str] = []


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group that the learner submits. ``size`` defaults to the run's group size, ``id`` to a new one."""

    task: dict[str, Any]
    size: int | None = None
    id: str = ""


class SubmitGroupsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    groups: list[GroupRequest]


class SubmitGroupsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    groups: list[str]


class EvaluationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Starts an evaluation: episodes outside the ledger, pinned to a version. Unfinished ones are cancelled after
    ``deadline_s`` seconds."""

    tasks: list[dict[str, Any]]
    episodes_per_task: int = 1
    version: str = ""
    """Default: the current version."""
    temperature: float | None = None
    deadline_s: float = 600.0


class EvaluationEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode of an evaluation that is over. ``reward`` is the sum over turns of agents that train."""

    episode: str
    task: Task
    status: Status
    reward: float | None
    turns: int
    failure: Failure | None = None


class EvaluationReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    evaluation: str
    version: str
    wanted: int
    done: int
    finished: bool
    hold_s: float
    """Seconds that a weight sync still has to wait for the evaluation; 0 if it need not wait."""
    episodes: list[EvaluationEpisode] = []


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of a run's groups by state."""

    open: int = 0
    eligible: int = 0
    leased: int = 0
    retired: dict[str, int] = {}
    """Retired groups by reason."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of a run, as the console and the commands ``runs`` and ``top`` show it."""

    name: str
    state: Literal["active", "finished", "closed"]
    version: str
    spec: dict[str, Any]
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
    reasons: list[Reason]
    """The reasons why a pull waits, or would wait if it came now."""
    selected: dict[str, int] = {}
    """Effects of the selection rules. Groups put in batches: ``fifo``, ``lifo``, ``uniform``, ``prioritized``, by that
    order; ``awaited``, by id. Of these, ``filtered``: for a pull with environments or tags; ``reused``: not for the
    first time; ``short``: with fewer members than requested; ``partial``: without waiting for the other members.
    ``zero_variance``: groups made eligible although their returns are all equal. ``topped_up``: members added."""
    mean_reward: float | None = None
    """Mean episode reward of the last 256 terminal records with rewards."""
    quarantined: int = 0
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


class HoldReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to whether weights may be replaced now.

    ``hold_s`` is 0 if they may; else it is the seconds until the named evaluations are over.
    """

    epoch: int
    hold_s: float
    evaluations: list[str] = []


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory in a listing."""

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


class TrajectoryList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of a listing, newest first. ``next`` is the ``before`` of the next page; empty at the end."""

    epoch: int
    trajectories: list[TrajectorySummary]
    next: str = ""

"""What crosses HTTP beside trajectories and batches: control messages as JSON.

* Durations, never absolute times, cross the wire; each is in seconds and says so in its name.
* Every answer carries the epoch of the orchestrator, which fences off a paused older one.
* Unknown fields are ignored by readers, so that either side can be newer by one release.
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
"""On every answer to a long poll: the wait that was granted."""

MAX_WAIT_S = 60.0
"""Longest long poll that the server grants unless it is set otherwise; a longer ``wait_s`` is shortened to it."""


# Workers ------------------------------------------------------------------------------------------------------


class AttemptKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one attempt. The nonce is known only to the worker that holds the lease."""

    episode: str
    attempt: int
    nonce: str


Slots = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""Of one worker. Those of a pool are added up, so a number that is none would be everyone's."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker asks for work.

    ``holding`` is all attempts that it has, finished ones in its spool included: given at its start and after an answer
    that did not arrive, so that what was granted in that one is granted again. None: as the answers so far said.
    """

    worker: str
    pool: str = "default"
    capabilities: list[str] = []
    slots: Slots
    """All slots of the worker."""
    free: int
    """Slots that are free now: at most so many attempts are granted."""
    holding: list[AttemptKey] | None = None
    wait_s: float = 0.0


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt, granted. The run's spec is fetched once per run and kept."""

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
    """Evaluation only: the version that must answer every turn."""
    temperature: float | None = None
    """Evaluation only: replaces the run's."""
    adapters: dict[str, str] = {}
    """The frozen adapter that plays an agent, by agent: the same in all episodes of the group."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stop this attempt. ``record``: whether a ``cancelled`` record is wanted from the worker (it has begun);
    otherwise the orchestrator has the episode's record already, or wants none."""

    episode: str
    attempt: int
    reason: str
    record: bool


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    attempts: list[Assignment] = []
    cancels: list[Cancel] = []
    drain: bool = False
    """Finish what you hold, take nothing new."""


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One per worker, for all its attempts, finished ones in the spool included. Renews their leases."""

    worker: str
    pool: str = "default"
    slots: Slots
    holding: list[AttemptKey] = []
    stats: dict[str, float] = {}
    """The worker's own gauges: ``event_loop_lag_s``, ``spool_bytes``, ``policy_waiting``, ``environment_waiting``; of
    each policy server ``policy_requests ADDRESS`` and ``policy_failures ADDRESS``, since the worker began."""


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    interval_s: float
    """When the next heartbeat is wanted."""
    cancels: list[Cancel] = []
    drain: bool = False


class ReturnRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that shuts down hands back attempts it will not finish. No retry budget is drawn."""

    worker: str
    attempts: list[AttemptKey]


class SubmissionHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Head of one record in a submission; the records' bytes follow in this order.

    ``POST /v1/worker/submit`` has the body ``u32 little-endian length of the JSON | JSON (list of these) | padding
    to 64 bytes | records, each a multiple of 64 bytes long``.
    """

    episode: str
    attempt: int
    nonce: str
    size_bytes: int


SubmitVerdict = Literal["accepted", "duplicate", "retrying", "superseded", "not-yours", "refused", "assets-missing"]
"""accepted: stored, on disk. duplicate: was accepted before (the first result stands). retrying: the failure was
retryable and the episode is queued again. superseded: a newer attempt exists or the episode is over; the record is
not wanted. not-yours: another worker's attempt or a wrong nonce. refused: not a valid record. assets-missing: nothing
was stored, since assets of the record are not there; send those and submit it again. The last four carry the error in
``problem``."""


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    episode: str
    verdict: SubmitVerdict
    problem: dict[str, Any] | None = None


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    results: list[SubmitResult]


MAX_ASSET_NAMES = 4096
"""Names of one request."""


class AssetsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of assets. A worker that has records which refer to them asks which are there already; a learner asks for
    their bytes."""

    names: Annotated[list[str], msgspec.Meta(max_length=MAX_ASSET_NAMES)]


class AssetHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Head of one asset in the answer to ``POST /v1/assets``, or the error that stands in its place.

    The body is ``u32 little-endian length of the JSON | JSON (list of these) | padding to 64 bytes | assets, each
    padded to 64 bytes``. It answers the first names of the request only, where all together would be too long.
    """

    size_bytes: int = 0
    problem: dict[str, Any] | None = None


class AssetsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``missing``: to be sent, each with ``PUT /v1/assets/{name}``. The others are kept for ``keep_s`` from now on, and
    for as long as a record refers to them that is submitted within that time."""

    epoch: int
    missing: list[str]
    keep_s: float


# Learners -----------------------------------------------------------------------------------------------------

Doing = Literal["waiting", "training", "evaluating", "checkpointing", "idle"]
"""What a learner says it is doing."""


class PullRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learner asks for a batch.

    ``learner`` is a name that survives its restart, ``session`` one process of it: leases of another session of the
    same learner are released at once. ``request`` makes a retry safe: the same request of a session is answered with
    the same batch until that is acked. ``groups`` awaits submitted groups by id.

    The ranks of a data-parallel learner share a session. Each asks for its ``shard`` of ``shards``, and names its k-th
    request as the others do: so it gets its shard of the same batch. ``batch`` asks for one that ``ResumeReply`` named,
    and for nothing else.

    ``environments`` and ``tags`` ask for groups of one of these environments that carry all of these tags. Empty: any.
    A batch is redelivered to a pull only if all its groups are what that asks for.
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
    """One reason why nothing can be served. ``code`` is one of: collecting, no-workers, all-stale, batches-held,
    shards-not-fetched, byte-bound, service-byte-bound, disk-bound, tasks-exhausted, groups-left, group-ended,
    evaluation-hold, quarantined, no-tasks, no-policy-servers, policy-saturated, weight-sync, adapters, draining,
    closed, filtered, zero-variance, row-too-long. Where a layer keeps failing it is LAYER-failing, such as
    policy-failing.

    ``group-ended``: an awaited group was retired unserved, ``facts["reason"]`` says why, and ``facts["failure"]`` how
    an episode of it failed last, where one did. ``shards-not-fetched``: a batch is held for ranks that did not pull,
    ``facts["missing"]`` lists them. ``filtered``: what is ready is not what the pull asks for. ``zero-variance``: the
    batch goes without groups whose returns are all equal. ``row-too-long``: groups were retired that fit into no bin.
    """

    code: str
    message: str
    facts: dict[str, Any] = {}


class EmptyReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pull that serves nothing. ``finished``: nothing will ever come. ``waited_s``: how long the server waited."""

    epoch: int
    reasons: list[Reason]
    finished: bool = False
    waited_s: float = 0.0


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learner that was started again asks for what it had. All ranks that share the session may ask; the batches are
    leased to it once."""

    learner: str
    session: str
    shards: int = 1


class ResumeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``batches`` that earlier sessions leased and never acked, oldest first: they are leased to this session now; a
    pull that names one fetches it. ``lost``: those that are not served to this learner again, and why."""

    epoch: int
    batches: list[str]
    lost: dict[str, str] = {}


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the weights of a version are, by a path that the policy servers can read: ``full``, a folder of safetensors
    as transformers writes it; ``adapter``, a folder of a LoRA adapter as PEFT writes it."""

    path: str
    kind: Literal["full", "adapter"] = "full"


class AckRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The batch was trained on. ``version`` is the one that the step made, in the text form ``lineage.n``; it is
    announced in the same record. Empty: the step made none. ``weights``: where it is; the service then loads it into
    the run's policy servers. Without, the learner has loaded it itself."""

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
    """Give a batch back. It is redelivered whole while within bound."""

    learner: str
    session: str
    generation: int
    reason: str


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Announce a version: the next ``n`` of the lineage (gaps are versions that were skipped). ``weights``: where it
    is; the service then loads it into the run's policy servers. Without, the learner has loaded it itself."""

    version: str
    weights: Weights | None = None


class RewindRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Go back to a checkpoint: open a new lineage that forks from ``version``."""

    version: str


class VersionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    version: str
    """The version now. After a rewind: ``(new lineage, n of the fork point)``."""


PolicyServerState = Literal["unknown", "serving", "syncing", "draining", "ejected"]
"""unknown: not heard of yet. serving: takes requests. syncing: paused for new weights. draining: finishes what it has,
takes nothing new. ejected: takes nothing until it confirms a version that it should have."""


class PolicyServerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One policy server of a run. ``version``: what it last confirmed; empty if it never did. ``paused_s``: seconds
    that it was paused for new weights so far, the pause that lasts included. ``running``, ``waiting``: requests in the
    engine. ``kv_cache_used``: share of its KV cache, 0 to 1. ``reason``: why it is not serving."""

    address: str
    state: PolicyServerState
    version: str = ""
    paused_s: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv_cache_used: float = 0.0
    reason: str = ""


class PolicyServersReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The policy servers of a run. ``revision`` grows whenever a server comes, goes or changes its state or version: a
    long poll that names the one it knows is answered at the next. ``sync``: what the weight sync is at, or why the last
    one failed; empty if there is nothing to say. ``skipped``: versions that were overtaken before any server had them,
    the last ones."""

    epoch: int
    revision: int
    servers: list[PolicyServerStatus] = []
    sync: str = ""
    skipped: list[str] = []


class PolicyServerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Add, drain or remove a policy server of a run while it runs. ``address``: as in ``policy.endpoints``."""

    address: str


class DoingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the learner is doing now; renews all its batch leases."""

    learner: str
    session: str
    doing: Doing


class PrioritiesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Priorities by group id, 1e-6 to 1e6: what a prioritized draw goes by from now on. A group starts with 1."""

    priorities: dict[str, float]


class PrioritiesReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many were set. ``over``: the groups that are not in flight any more."""

    epoch: int
    set: int
    over: list[str] = []


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group that the learner wants. ``size`` defaults to the run's group size; ``id`` to a fresh one."""

    task: dict[str, Any]
    size: int | None = None
    id: str = ""


class SubmitGroupsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    groups: list[GroupRequest]


class SubmitGroupsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    groups: list[str]


class EvaluationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Episodes outside the ledger, pinned to a version. Unfinished ones are cancelled after ``deadline_s``."""

    tasks: list[dict[str, Any]]
    episodes_per_task: int = 1
    version: str = ""
    """Default: the version now."""
    temperature: float | None = None
    deadline_s: float = 600.0


class EvaluationEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished line of an evaluation. ``reward`` is the sum over turns of agents that train."""

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
    """Seconds that a weight sync still has to wait for it; 0 when none."""
    episodes: list[EvaluationEpisode] = []


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Groups of a run by state."""

    open: int = 0
    eligible: int = 0
    leased: int = 0
    retired: dict[str, int] = {}
    """Retired groups by reason."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run, as pages, ``runs`` and ``top`` show it."""

    name: str
    state: Literal["active", "finished", "closed"]
    version: str
    spec: dict[str, Any]
    groups: GroupCounts
    credit: int
    """Groups that may still be admitted now."""
    in_flight: int
    """Groups in flight: admitted and not retired."""
    queued: int
    """Episodes that wait for a slot."""
    leased: int
    """Episodes at workers."""
    attainable: int | None = None
    """Training episodes that the policy servers take at a time, as their metrics say; None for no cap."""
    episodes: dict[str, int]
    """Terminal records by status (evaluation not counted)."""
    batches_acked: int
    batches_open: int
    learner_doing: str
    learner_doing_s: float
    """Seconds since it said so; -1 if it never did."""
    learner_waiting: bool
    """A pull is waiting now."""
    reasons: list[Reason]
    """What it waits on (or would, if it pulled now)."""
    selected: dict[str, int] = {}
    """What the rules of selection did. Groups put in batches: ``fifo``, ``lifo``, ``uniform``, ``prioritized``, by that
    order; ``awaited``, by name. Of them ``filtered``: by a pull that asked for some kinds only; ``reused``: not for the
    first time; ``short``: with fewer members than were asked for; ``partial``: since the others were not waited for.
    Groups made eligible: ``zero_variance``, although their returns are all equal. ``topped_up``: members added."""
    mean_reward: float | None = None
    """Mean episode reward over the last 256 terminal records with rewards."""
    quarantined: int = 0
    servers: dict[str, int] = {}
    """Its policy servers by state."""
    weight_sync: str = ""
    """What the weight sync is at, or why it fails; empty if there is nothing to say."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker, as pages and ``top`` show it."""

    worker: str
    pool: str
    capabilities: list[str]
    slots: int
    leased: int
    seen_s: float
    """Seconds since its last word."""
    draining: bool
    stats: dict[str, float] = {}


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole service, for ``/v1/status``."""

    epoch: int
    version: str
    uptime_s: float
    runs: list[RunStatus]
    workers: list[WorkerStatus]
    store: dict[str, float]
    """``log_bytes``, ``trajectories``, ``sync_p50_s``, ..."""


class HoldReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether weights may be replaced now. ``hold_s`` is 0 when they may; else the named evaluations run until then."""

    epoch: int
    hold_s: float
    evaluations: list[str] = []


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a listing."""

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
    """Sum over turns of agents that train; None where the episode failed or was cancelled."""
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
    """What a batch says of one row: its segment in the trajectory, and a value for each of its turns. ``advantages`` is
    None with estimator ``none``."""

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

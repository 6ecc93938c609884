"""Messages of learners about batches and their leases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.wire.messages.fields import Labels, Note
from headrace.wire.messages.versions import Weights

Doing = Literal["waiting", "training", "evaluating", "checkpointing", "idle", "gone"]
"""The activity that a learner reports. ``gone``: its client was closed."""

HeartbeatInterval = Annotated[float, msgspec.Meta(ge=0, le=86400)]
"""Seconds between reports of a learner."""


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
    environments: Labels = []
    tags: Labels = []
    heartbeat_s: HeartbeatInterval = 0.0
    """The learner reports its activity at least that often until it is gone; 0: no promise."""


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reason why no batch can be served. ``code`` is one of: collecting, no-workers, all-stale, batches-held,
    shards-not-fetched, byte-bound, service-byte-bound, disk-bound, tasks-exhausted, groups-left, group-ended,
    evaluation-hold, quarantined, no-tasks, no-policy-servers, policy-saturated, weight-sync, adapters, draining,
    closed, filtered, zero-variance, row-too-long, no-rows, prompts-differ, estimator-failing,
    selection-rule-failing, oldest-group, policy-outdated. A layer that keeps failing has LAYER-failing, such as
    policy-failing.

    ``group-ended``: an awaited group was retired unserved; ``facts["reason"]`` says why, and ``facts["failure"]`` is
    the last failure of an episode of it, if one failed. ``shards-not-fetched``: a batch is held for ranks that did not
    pull, listed in ``facts["missing"]``. ``filtered``: eligible groups do not match the pull. ``zero-variance``: the
    batch omits groups whose returns are all equal. ``row-too-long``: groups were retired that did not fit into a bin.
    ``no-rows``: episodes ended without a turn to train on, counted by cause. ``prompts-differ``: members of a group had
    different first prompts.
    ``estimator-failing``, ``selection-rule-failing``: the estimator or selection rule of the run, ``facts["name"]``,
    failed at the last batch.
    ``oldest-group``: enough groups are ready, and the batch waits for an older one rather than let it go stale.
    ``policy-outdated``: no policy server has a version that could be served; ``facts["servers"]`` has theirs.
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
    """``version``: the run's current one. ``same_weights_as``: as in ``VersionReply``."""

    epoch: int
    batch: str
    version: str
    same_weights_as: str = ""


class NackRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gives a batch back. It is redelivered whole while it is fresh enough."""

    learner: str
    session: str
    generation: int
    reason: Note


class DoingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The learner's current activity. It renews all its batch leases."""

    learner: str
    session: str
    doing: Doing
    heartbeat_s: HeartbeatInterval = 0.0
    """The interval of its reports, as in ``PullRequest``."""
    renewal: bool = False
    """The client repeats the last report by itself, for the leases and as a heartbeat."""

"""Batches: frozen groups, leased to a learner.

An open batch is ``released`` (frozen, waits to be pulled) or ``leased``. A closed one was acked or dissolved, and is
remembered. A lease belongs to one session of a learner: one process, or all ranks of a data-parallel learner, which
share it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from headrace.trajectory import Version
from headrace_orchestrator.scheduler.events import BatchLeased
from headrace_orchestrator.scheduler.state.groups import Group

NACKED = "nacked: "
"""Prefix of the reason of a release where the holder gave the batch back itself."""

EARLIER_SESSIONS = 16
"""Maximum number of earlier sessions remembered for a learner, to tell an old process from a new one."""

SHARDED_PULLS = 256
"""Maximum number of pulls remembered for a session, with their batches: far more than ranks can be apart."""


class ClosedBatch(NamedTuple):
    """A batch that is over, remembered to answer a late ack. ``learner`` held it last and did not give it back;
    ``before`` held it before another learner took it; ``reason`` is why it was dissolved."""

    end: Literal["acked", "dissolved"]
    session: str
    generation: int
    version: str
    learner: str
    before: str
    reason: str


class LearnerSessions(msgspec.Struct, array_like=True):
    """The sessions of a learner that leased batches: the current one, earlier ones, oldest first, and the batch that
    answered each of the current session's pulls in shards."""

    current: str
    earlier: list[str] = []
    pulls: dict[str, str] = {}


class OpenBatch:
    """A frozen batch that is not over. ``deadline`` is soft."""

    __slots__ = (
        "before",
        "deadline",
        "fetched",
        "generation",
        "groups",
        "id",
        "lapsed",
        "learner",
        "leased",
        "release_reason",
        "request",
        "session",
        "shards",
        "version",
    )

    def __init__(self, id: str, groups: list[Group], version: Version) -> None:
        self.id = id
        self.groups = groups
        self.version = version
        self.leased = False
        #: Its lease ran out; the holder may still ack until it is redelivered.
        self.lapsed = False
        self.generation = 0
        self.learner = ""
        self.session = ""
        self.request = ""
        self.deadline = 0.0
        #: Ranks that share the lease, and the shards that were served under it.
        self.shards = 1
        self.fetched: list[int] = []
        #: The reason why the last lease ended unacked.
        self.release_reason = ""
        #: The learner that held it before another one took it.
        self.before = ""

    @property
    def missing(self) -> list[int]:
        """Shards that were not fetched yet."""
        return [shard for shard in range(self.shards) if shard not in self.fetched]

    @property
    def given_back(self) -> bool:
        """True if its last holder gave it back."""
        return not self.leased and self.release_reason.startswith(NACKED)

    def lease(self, event: BatchLeased) -> None:
        """Begin a lease."""
        if self.learner not in ("", event.learner) and not self.given_back:
            self.before = self.learner
        self.leased = True
        self.lapsed = False
        self.generation = event.generation
        self.learner = event.learner
        self.session = event.session
        self.request = event.request
        self.shards = event.shards
        self.fetched = list(event.fetched)
        self.release_reason = ""

    def fetch(self, generation: int, shard: int) -> None:
        """Count a shard that is served under the lease. A lease that ran out is valid again: its holder is active."""
        self.generation = max(self.generation, generation)
        if self.lapsed:
            self.leased, self.lapsed, self.release_reason = True, False, ""
        if shard not in self.fetched:
            self.fetched.append(shard)

    def release(self, reason: str, lapsed: bool) -> None:
        """End the lease unacked."""
        self.leased = False
        self.lapsed = lapsed
        self.release_reason = reason

    def close(self, end: Literal["acked", "dissolved"], version: str = "", reason: str = "") -> ClosedBatch:
        """The remembered form of the batch."""
        learner = "" if self.given_back else self.learner
        return ClosedBatch(end, self.session, self.generation, version, learner, self.before, reason)

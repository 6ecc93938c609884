"""Batches: frozen groups, leased to a learner.

States: ``released`` (frozen, waits to be pulled), ``leased``; acked and dissolved ones are closed and remembered.
A lease belongs to one session of a learner: one process, or all ranks of a data-parallel learner, which share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from headrace.trajectory import Version

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.events import BatchLeased
    from headrace_orchestrator.scheduler.state.groups import Group


NACKED = "nacked: "
"""How the reason of a release begins where the holder gave the batch back itself."""

EARLIER_SESSIONS = 16
"""Earlier sessions of a learner that are remembered, to tell an old process from a new one."""

SHARDED_PULLS = 256
"""Pulls of a session that are remembered with their batches: far more than ranks of one step can be apart."""


class Closed(NamedTuple):
    """What is remembered of a batch that is over, to answer a late ack. ``learner`` held it last and did not give it
    back; ``before`` held it before another learner took it; ``reason`` is why it was dissolved."""

    end: Literal["acked", "dissolved"]
    session: str
    generation: int
    version: str
    learner: str
    before: str
    reason: str


class Sessions(msgspec.Struct, array_like=True):
    """Of a learner that leased batches: its session now, those before it, oldest first, and which batch answered which
    of the session's pulls in shards."""

    now: str
    earlier: list[str] = []
    pulls: dict[str, str] = {}


class Batch:
    """A frozen batch. ``deadline`` is soft."""

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
        "released",
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
        #: How many ranks share the lease, and the shards that were served under it.
        self.shards = 1
        self.fetched: list[int] = []
        #: Why the last lease ended unacked.
        self.released = ""
        #: The learner that held it, until another took it.
        self.before = ""

    @property
    def missing(self) -> list[int]:
        """Shards that nobody has fetched."""
        return [shard for shard in range(self.shards) if shard not in self.fetched]

    @property
    def given_back(self) -> bool:
        """Whether its last holder did not want it."""
        return not self.leased and self.released.startswith(NACKED)

    def lease(self, event: BatchLeased) -> None:
        """Take a lease."""
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
        self.released = ""

    def fetch(self, generation: int, shard: int) -> None:
        """A shard is served under the lease. One that ran out lives again: its holder is there."""
        self.generation = max(self.generation, generation)
        if self.lapsed:
            self.leased, self.lapsed, self.released = True, False, ""
        if shard not in self.fetched:
            self.fetched.append(shard)

    def release(self, reason: str, lapsed: bool) -> None:
        """The lease is over, unacked."""
        self.leased = False
        self.lapsed = lapsed
        self.released = reason

    def closed(self, end: Literal["acked", "dissolved"], version: str = "", reason: str = "") -> Closed:
        """What is remembered of it."""
        learner = "" if self.given_back else self.learner
        return Closed(end, self.session, self.generation, version, learner, self.before, reason)

"""Batches: frozen groups, leased to a learner.

States: ``released`` (frozen, waits to be pulled), ``leased``; acked and dissolved ones are closed and remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from headrace.trajectory import Version

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.states import Group


class Closed(NamedTuple):
    """What is remembered of a batch that is over, to answer a late ack."""

    end: Literal["acked", "dissolved"]
    session: str
    generation: int
    version: str


class Batch:
    """A frozen batch. ``deadline`` is soft."""

    __slots__ = (
        "deadline",
        "generation",
        "groups",
        "id",
        "lapsed",
        "learner",
        "leased",
        "request",
        "session",
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

    def lease(self, generation: int, learner: str, session: str, request: str, deadline: float) -> None:
        """Take a lease."""
        self.leased = True
        self.lapsed = False
        self.generation = generation
        self.learner = learner
        self.session = session
        self.request = request
        self.deadline = deadline

    def release(self, lapsed: bool) -> None:
        """The lease is over, unacked."""
        self.leased = False
        self.lapsed = lapsed

"""Evaluations: episodes of a live run, pinned to a version, outside the ledger, in no batch.

* Episodes that are not over at the deadline are cancelled; the report counts them as wanted and not done.
* An evaluation whose episodes were all cancelled before its deadline ends as cancelled.
* A weight sync waits for evaluations of the version that is served; never longer than their deadlines, and not for one
  that nobody asks for any more.
* A newer version may be announced meanwhile; what cannot be finished on the pinned one is cancelled at the deadline.
* Where the service loads the weights, an evaluation of a version that is yet to be loaded waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.trajectory import Version
from headrace.wire import messages

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.events import EpisodeEnded
    from headrace_orchestrator.scheduler.state.groups import Group


HOLD_LEASE_S = 90.0
"""An evaluation that nobody asked for in so long holds up no weight sync: longer than the longest poll."""


class Evaluation:
    """One evaluation. ``deadline`` is soft: a replay gives it its full term again."""

    __slots__ = (
        "asked_at",
        "cut",
        "deadline",
        "deadline_s",
        "done",
        "episodes",
        "expired",
        "groups",
        "id",
        "left",
        "reason",
        "temperature",
        "version",
        "wanted",
    )

    def __init__(
        self, id: str, version: Version, wanted: int, deadline_s: float, temperature: float | None, now: float
    ) -> None:
        self.id = id
        self.version = version
        self.wanted = wanted
        self.deadline_s = deadline_s
        self.temperature = temperature
        self.deadline = now + deadline_s
        #: Soft: when somebody asked how it stands.
        self.asked_at = now
        #: Soft: whether the deadline has cancelled what was not over.
        self.expired = False
        self.groups: list[Group] = []
        #: Whether its deadline retired some of them.
        self.cut = False
        #: Episodes that are not over.
        self.left = wanted
        #: Episodes that ended in a result or a failure, not cancelled.
        self.done = 0
        self.episodes: list[messages.EvaluationEpisode] = []
        #: Why it is over; empty while it is not.
        self.reason = ""

    def take(self, event: EpisodeEnded) -> None:
        """One of its episodes is over."""
        self.left -= 1
        if event.status != "cancelled":
            self.done += 1
        scored = event.status in ("finished", "truncated") and event.rewards
        self.episodes.append(
            messages.EvaluationEpisode(
                episode=event.episode,
                task=event.task,
                status=event.status,
                reward=sum(event.rewards.values()) if scored else None,
                turns=event.turns,
                failure=event.failure,
            )
        )

    def end(self, closed: bool) -> str:
        """Why it is over, now that its episodes are."""
        if self.done == self.wanted:
            return "done"
        if closed:
            return "closed"
        return "deadline" if self.cut else "cancelled"

    def hold_s(self, now: float) -> float:
        """Seconds that its version has to stay loaded; 0 when it is over, or should be, or nobody asks for it."""
        return 0.0 if self.reason else max(0.0, min(self.deadline, self.asked_at + HOLD_LEASE_S) - now)

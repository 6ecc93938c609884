"""Evaluations: episodes of a live run, pinned to a version, outside the ledger, in no batch.

* Episodes that are not over at the deadline are cancelled; the report counts them as wanted and not done.
* An evaluation whose episodes were all cancelled before its deadline ends as cancelled.
* A weight sync waits for evaluations of the version that is served, but never longer than their deadlines, and not for
  one whose report is not requested any more.
* A newer version may be announced meanwhile; episodes that cannot finish on the pinned one end at the deadline.
* If the service loads the weights, an evaluation of a version that is not loaded yet waits for it.
"""

from __future__ import annotations

from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler.events import EpisodeEnded

REPORT_LEASE_S = 90.0
"""Seconds after which an evaluation whose report was not requested stops holding up a weight sync: longer than the
longest poll."""


class Evaluation:
    """An evaluation. ``deadline`` is soft: a replay renews its full term."""

    __slots__ = (
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
        "reported_at",
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
        #: Soft: when its report was last requested.
        self.reported_at = now
        #: Soft: whether the deadline has cancelled the remaining episodes.
        self.expired = False
        #: Ids of its groups while it is active.
        self.groups: list[str] = []
        #: Whether its deadline retired some of them.
        self.cut = False
        #: Episodes that are not over.
        self.left = wanted
        #: Episodes that ended in a result or a failure, not cancelled.
        self.done = 0
        self.episodes: list[messages.EvaluationEpisode] = []
        #: The reason why it is over; empty before.
        self.reason = ""

    def add_result(self, event: EpisodeEnded) -> None:
        """Add the result of one of its episodes."""
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

    def end_reason(self, closed: bool) -> str:
        """The reason with which it ends once all its episodes are over; ``closed``: its run was closed."""
        if self.done == self.wanted:
            return "done"
        if closed:
            return "closed"
        return "deadline" if self.cut else "cancelled"

    def hold_s(self, now: float) -> float:
        """Seconds for which its version has to stay loaded; 0 when it is over or overdue, or its report is not
        requested any more."""
        return 0.0 if self.reason else max(0.0, min(self.deadline, self.reported_at + REPORT_LEASE_S) - now)

"""The failure backoff: a run in an outage, or none of whose groups can be used, is slowed down to single tries.

* While failures look like an outage, or no group can be used, single attempts are granted, at growing intervals.
* One usable record after failures, or one eligible group after stale or unusable ones, lifts it at once.
* Attempts at workers continue; where no group can be used, the next try waits for them.

Without it a policy that is down, a mistyped environment, or weights that were announced and never loaded use up the
retry budget of all queued episodes, and fill the disk with failures, at the full speed of the fleet. It is soft: a
restart begins with a first try. ``failure_streak`` tells an outage from broken tasks.
"""

from __future__ import annotations

FIRST_S = 0.1
"""Seconds until the first single try: about the time in which an endpoint restarts."""

GROWTH = 0.1
"""Each interval, as a share of the time since the run was slowed down: the share of an outage that is lost after its
end. Each try may pass a broken task, so a smaller share passes more of them in the same time."""

LONGEST_S = 10.0
"""Maximum seconds between single tries: the most time lost after the cause is gone."""

UNLIMITED = 1 << 62
"""Room of a run that is not slowed down."""


class FailureBackoff:
    """The backoff of one run: when it was slowed down, None while it is not, and when its next single try is due."""

    __slots__ = ("next_try", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.next_try = 0.0

    def room(self, slowed: bool, awaited: int, now: float) -> int:
        """Attempts that may be granted to a run that is to be slowed down or not; the next try waits for ``awaited``
        attempts at workers."""
        if not slowed:
            self.since = None
            return UNLIMITED
        if self.since is None:
            self.since, self.next_try = now, now + FIRST_S
        return 1 if now >= self.next_try and not awaited else 0

    def count_try(self, now: float) -> None:
        """Schedule the next single try after one was granted: the longer this lasts, the later."""
        if self.since is not None:
            self.next_try = now + min(LONGEST_S, max(FIRST_S, GROWTH * (now - self.since)))

    def deadline(self, queued: int, awaited: int) -> float | None:
        """The moment of the next try; None if the run is not slowed down, or has nothing to try."""
        return self.next_try if self.since is not None and queued and not awaited else None

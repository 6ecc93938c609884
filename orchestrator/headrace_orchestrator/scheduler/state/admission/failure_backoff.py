"""The brake: a run that only fails, or whose groups only go stale, is slowed down to single tries.

* While the last attempts all failed, or groups only go stale, one attempt at a time is granted, at growing intervals.
* One usable record after failures, or one group within bound after stale ones, lifts it at once.
* What is at workers already goes on.

Without it a policy that is down, a mistyped environment, or weights that were announced and never loaded burn the retry
budget of everything that is queued, and fill the disk with failures, at the full speed of the fleet. It is soft: a
restart begins with a first try.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.state.run import Run

FIRST_S = 0.1
"""Until the first single try: an endpoint that restarts is back in about that time."""

GROWTH = 0.5
"""Each interval is this share of the time that the brake has been on."""

LONGEST_S = 10.0
"""Between single tries at most: so much is lost when the cause is gone."""

UNLIMITED = 1 << 62
"""Room of a run that is not slowed down."""


class FailureBackoff:
    """When a run was slowed down, and when its next single try is due; None while it is not."""

    __slots__ = ("next_try", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.next_try = 0.0

    def lift(self) -> None:
        """Full speed again."""
        self.since = None

    def tried(self, now: float) -> None:
        """A single try was granted: the next one is later the longer this lasts."""
        lasted = now - self.since if self.since is not None else 0.0
        self.next_try = now + min(LONGEST_S, max(FIRST_S, GROWTH * lasted))


def fails(run: Run) -> bool:
    """Whether all of the last attempts failed."""
    return len(run.recent) == run.recent.maxlen and all(failure is not None for failure in run.recent)


def only_stale(run: Run) -> bool:
    """Whether groups have gone stale one after the other, more of them than two batches."""
    return run.stale_in_row > max(run.recent.maxlen or 0, 2 * run.ledger.capacity)


def room(run: Run, now: float) -> int:
    """Attempts that the brake lets a run have now."""
    failure_backoff = run.failure_backoff
    if not fails(run) and not only_stale(run):
        failure_backoff.lift()
        return UNLIMITED
    if failure_backoff.since is None:
        failure_backoff.since, failure_backoff.next_try = now, now + FIRST_S
    return 1 if now >= failure_backoff.next_try and not run.leased + run.evaluation_leased else 0


def next_try(run: Run) -> float | None:
    """When a slowed run wants to be looked at; None if it is not slowed, or has nothing to try."""
    waits = run.failure_backoff.since is not None and run.queued + run.evaluation_queued > 0
    return run.failure_backoff.next_try if waits and not run.leased + run.evaluation_leased else None

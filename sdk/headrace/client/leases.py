"""The batch leases that a client holds, and the times at which to renew them. Pure: the clock is passed in.

* A lease is renewed at a third of its term.
* A batch that was acked or given back is not renewed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from headrace.wire.messages import Doing

RENEW_AT = 1 / 3
"""Share of a term after which it is renewed: two renewals may fail before a lease expires."""


@dataclass
class _HeldLease:
    lease_s: float
    renew_at: float


class BatchLeases:
    """The held batches by (run, batch). Safe for use by several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[tuple[str, str], _HeldLease] = {}
        self._activities: dict[str, Doing] = {}

    def hold(self, run: str, batch: str, lease_s: float) -> None:
        """Add a batch that was served, or served again."""
        with self._lock:
            self._leases[run, batch] = _HeldLease(lease_s, self._clock() + lease_s * RENEW_AT)

    def drop(self, run: str, batch: str) -> None:
        """Remove a batch that is no longer held."""
        with self._lock:
            self._leases.pop((run, batch), None)

    def set_activity(self, run: str, doing: Doing) -> None:
        """Set the learner's activity, which renewals report from now on."""
        with self._lock:
            self._activities[run] = doing

    def activity(self, run: str) -> Doing:
        """The activity that a renewal reports. A learner that holds a batch and reported nothing trains on it."""
        with self._lock:
            activity = self._activities.get(run, "training")
            return "training" if activity in ("waiting", "idle") else activity

    def mark_renewed(self, run: str) -> None:
        """Schedule the next renewal a third of a term after this one was sent, whether or not this one succeeds."""
        with self._lock:
            now = self._clock()
            for (other, _), lease in self._leases.items():
                if other == run:
                    lease.renew_at = now + lease.lease_s * RENEW_AT

    def due(self) -> list[str]:
        """Runs with a lease to renew now."""
        with self._lock:
            now = self._clock()
            return sorted({run for (run, _), lease in self._leases.items() if lease.renew_at <= now})

    def next_due_s(self) -> float | None:
        """Seconds until the next renewal is due, or None if no batch is held."""
        with self._lock:
            if not self._leases:
                return None
            return max(0.0, min(lease.renew_at for lease in self._leases.values()) - self._clock())

"""The batch leases that a client holds, and the times at which to renew them. Pure: the clock is passed in.

* A lease is renewed at a third of its term.
* A batch that was acked or given back is not renewed.
* A learner reports its activity every ten seconds from its first pull on, whether or not it holds a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from headrace.wire.messages import Doing

RENEW_AT = 1 / 3
"""Share of a term after which it is renewed: two renewals may fail before a lease expires."""


HEARTBEAT_S = 10.0
"""Seconds between reports of a learner's activity, so that the service notices its death within half a minute."""


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
        #: When the next report is due, by run of which this client has pulled.
        self._reports: dict[str, float] = {}

    def attend(self, run: str) -> None:
        """Note a pull: the learner is there until the client is closed."""
        with self._lock:
            self._reports.setdefault(run, self._clock() + HEARTBEAT_S)

    def leave(self, run: str) -> None:
        """Send no more reports for a run."""
        with self._lock:
            self._reports.pop(run, None)

    def attended(self) -> list[str]:
        """The runs of which this client has pulled."""
        with self._lock:
            return sorted(self._reports)

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
        """The activity to report. A learner that holds a batch and reported nothing trains on it."""
        with self._lock:
            if run in self._reports and not any(held == run for held, _ in self._leases):
                return self._activities.get(run, "idle")
            activity = self._activities.get(run, "training")
            return "training" if activity in ("waiting", "idle") else activity

    def mark_renewed(self, run: str) -> None:
        """Schedule the next report, and the next renewal a third of a term after this one was sent, whether or not
        this one succeeds."""
        with self._lock:
            now = self._clock()
            if run in self._reports:
                self._reports[run] = now + HEARTBEAT_S
            for (other, _), lease in self._leases.items():
                if other == run:
                    lease.renew_at = now + lease.lease_s * RENEW_AT

    def due(self) -> list[str]:
        """Runs with a lease to renew, or a report to send, now."""
        with self._lock:
            now = self._clock()
            leases = {run for (run, _), lease in self._leases.items() if lease.renew_at <= now}
            return sorted(leases | {run for run, due_at in self._reports.items() if due_at <= now})

    def next_due_s(self) -> float | None:
        """Seconds until the next renewal or report is due, or None if there is none."""
        with self._lock:
            moments = [*(lease.renew_at for lease in self._leases.values()), *self._reports.values()]
            return max(0.0, min(moments) - self._clock()) if moments else None

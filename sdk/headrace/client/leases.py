"""The batch leases that a client holds, and when each wants to be renewed. Pure: the clock is passed in.

* A lease is renewed at a third of its term.
* A batch that was acked or given back is not renewed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from headrace.wire.messages import Doing

RENEW_AT = 1 / 3
"""Share of a term after which it is renewed: two renewals may get lost before a lease runs out."""


@dataclass
class _HeldLease:
    lease_s: float
    renew_at: float


class BatchLeases:
    """Which batches are held, by (run, batch). Safe for use by several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], _HeldLease] = {}
        self._said: dict[str, Doing] = {}

    def hold(self, run: str, batch: str, lease_s: float) -> None:
        """A batch came, or came again."""
        with self._lock:
            self._held[run, batch] = _HeldLease(lease_s, self._clock() + lease_s * RENEW_AT)

    def drop(self, run: str, batch: str) -> None:
        """The batch is held no longer."""
        with self._lock:
            self._held.pop((run, batch), None)

    def say(self, run: str, doing: Doing) -> None:
        """What the learner says it is doing from now on."""
        with self._lock:
            self._said[run] = doing

    def doing(self, run: str) -> Doing:
        """What a renewal repeats. A learner that holds a batch and has said nothing trains on it."""
        with self._lock:
            said = self._said.get(run, "training")
            return "training" if said in ("waiting", "idle") else said

    def renewed(self, run: str) -> None:
        """A renewal was sent: the next one is a third of a term later, whatever becomes of this one."""
        with self._lock:
            now = self._clock()
            for (other, _), held in self._held.items():
                if other == run:
                    held.renew_at = now + held.lease_s * RENEW_AT

    def due(self) -> list[str]:
        """Runs that hold a lease to be renewed now."""
        with self._lock:
            now = self._clock()
            return sorted({run for (run, _), held in self._held.items() if held.renew_at <= now})

    def next_due_s(self) -> float | None:
        """Seconds until a run is due, or None if nothing is held."""
        with self._lock:
            if not self._held:
                return None
            return max(0.0, min(held.renew_at for held in self._held.values()) - self._clock())

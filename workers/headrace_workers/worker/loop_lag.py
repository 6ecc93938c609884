"""Event-loop lag: how late the worker's event loop gets to what is due.

* A loop that is stuck now shows its lag now, to a thread that asks.
* How long it stands still now is told apart from its worst lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
"""Often enough to see a stall of a heartbeat's length, seldom enough to cost nothing."""


class LoopLag:
    """``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_at = clock() + TICK_S
        self._worst_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            self._due_at = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._worst_s = max(self._worst_s, self._clock() - self._due_at)

    def stuck_s(self) -> float:
        """For how long the loop has not got to what was due. Safe to call from another thread."""
        return max(0.0, self._clock() - self._due_at)

    def take_worst_s(self) -> float:
        """The worst lag since the last call, the present one included. Safe to call from another thread."""
        worst_s = max(self._worst_s, self.stuck_s())
        self._worst_s = 0.0
        return worst_s

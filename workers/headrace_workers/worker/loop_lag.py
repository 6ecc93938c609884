"""Event-loop lag: the delay between the time a callback is due and the time it runs.

* Other threads see the lag of a stuck loop immediately.
* The current lag and the worst lag are separate values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
"""Interval of the measurement: short compared to a heartbeat's interval, with negligible cost."""


class LoopLag:
    """Measures the lag of the running event loop. ``clock`` is monotonic, in seconds."""

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

    def current_lag_s(self) -> float:
        """Current lag. Safe to call from another thread."""
        return max(0.0, self._clock() - self._due_at)

    def take_worst_s(self) -> float:
        """Return and reset the worst lag, including the current one. Safe to call from another thread."""
        worst_s = max(self._worst_s, self.current_lag_s())
        self._worst_s = 0.0
        return worst_s

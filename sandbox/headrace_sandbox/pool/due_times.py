"""The times at which something is due, each with the name of the thing.

* Obsolete times are removed, so memory stays bounded: most requests are served, and most leases renewed, before they
  are due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

MIN_DUE = 1024
"""Number of times that are kept without a check; beyond it, the obsolete ones are removed."""


class DueTimes:
    """A heap of times. ``is_awaited``: True if something may still be due at a time."""

    def __init__(self, is_awaited: Callable[[float, str], bool]) -> None:
        self._is_awaited = is_awaited
        self._heap: list[tuple[float, str]] = []
        self._remove_above = MIN_DUE

    def __iter__(self) -> Iterator[tuple[float, str]]:
        return iter(self._heap)

    def add(self, at: float, name: str) -> None:
        """Add a time."""
        heapq.heappush(self._heap, (at, name))
        if len(self._heap) > self._remove_above:
            self._heap = [due for due in set(self._heap) if self._is_awaited(*due)]
            heapq.heapify(self._heap)
            self._remove_above = max(MIN_DUE, 2 * len(self._heap))

    def next(self) -> float | None:
        """The earliest time, if there is one."""
        return self._heap[0][0] if self._heap else None

    def pop_until(self, now: float) -> Iterator[str]:
        """Remove the times up to now; yields their names."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

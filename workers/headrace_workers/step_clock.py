"""The clock of one step of an environment: what counts for its deadline and for the episode's working time.

* While an outside call is open (a sandbox, a bounded call, a call of an environment's own process), the step's deadline
  stands still; the call has its own.
* Of the time in which outside calls are open, only the time counts in which one of them worked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class StepClock:
    """Measures the steps of one episode, one after the other. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open_calls = 0
        self._waiting_since = 0.0
        self._work: list[tuple[float, float]] = []
        self._deadline_left_s: float | None = None
        self.deadline: asyncio.Timeout | None = None
        """The deadline of the current step."""
        self.waited_s = 0.0
        """Time so far in which calls were open but none worked."""

    def add_work(self, work_s: float) -> None:
        """Count work that ends now as working time of an open call."""
        now = self._clock()
        self._work.append((now - work_s, now))

    @contextlib.contextmanager
    def outside_call(self) -> Iterator[None]:
        """Count the time of an open call as waiting, except its work."""
        if self._open_calls == 0:
            self._waiting_since, self._work = self._clock(), []
            self._deadline_left_s = _stop_deadline(self.deadline)
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1
            if self._open_calls == 0:
                passed_s = self._clock() - self._waiting_since
                worked_s = min(passed_s, union_s(self._work))
                self.waited_s += passed_s - worked_s
                if self.deadline is not None and self._deadline_left_s is not None:
                    left_s = max(0.0, self._deadline_left_s - worked_s)
                    self.deadline.reschedule(asyncio.get_running_loop().time() + left_s)


def _stop_deadline(deadline: asyncio.Timeout | None) -> float | None:
    """Stop a deadline; return the seconds left until it."""
    when = None if deadline is None else deadline.when()
    if deadline is None or when is None:
        return None
    deadline.reschedule(None)
    return when - asyncio.get_running_loop().time()


def union_s(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of time intervals, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

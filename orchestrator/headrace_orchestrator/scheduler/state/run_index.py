"""Runs by their next deadline, and runs with queued episodes by their leased ones: both without a look at every run.

* A run is looked at again after each of its events, and when its deadline has passed.
* Soft changes may make a deadline later, never earlier: one that is too early costs one look.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from headrace_orchestrator.scheduler.state.run import Run


class RunDeadlines:
    """The next deadline of each run that has one."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        #: Runs with a leased batch.
        self.leasing: set[str] = set()

    def place(self, run: Run, deadline: float | None) -> None:
        """Set the deadline of a run."""
        if any(batch.leased for batch in run.batches.values()):
            self.leasing.add(run.name)
        else:
            self.leasing.discard(run.name)
        if deadline is None:
            self._deadlines.pop(run.name, None)
        elif self._deadlines.get(run.name) != deadline:
            self._deadlines[run.name] = deadline
            heapq.heappush(self._heap, (deadline, run.name))

    def first(self) -> tuple[float, str] | None:
        """The first deadline and its run."""
        while self._heap:
            deadline, name = self._heap[0]
            if self._deadlines.get(name) == deadline:
                return deadline, name
            heapq.heappop(self._heap)
        return None


class ReadyRuns:
    """The runs of a pool that have queued episodes. Runs are told apart by their place in the pool."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self._leased: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}

    def place(self, place: int, run: Run) -> None:
        """Look at a run again."""
        if not (run.queued or run.evaluation_queued):
            self._leased.pop(place, None)
            self.runs.pop(place, None)
            return
        leased = run.leased + run.evaluation_leased
        self.runs[place] = run
        if self._leased.get(place) != leased:
            self._leased[place] = leased
            heapq.heappush(self._heap, (leased, place))

    def take(self) -> tuple[int, int] | None:
        """Leased episodes and place of the next run: fewest leased first, then the oldest. None at the end."""
        while self._heap:
            leased, place = heapq.heappop(self._heap)
            if self._leased.get(place) == leased and place not in self._taken:
                self._taken[place] = leased
                return leased, place
        return None

    def restore(self) -> None:
        """Put all runs back that were taken."""
        for place, leased in self._taken.items():
            heapq.heappush(self._heap, (leased, place))
        self._taken.clear()


class RunIndex:
    """Both indexes of all runs."""

    def __init__(self) -> None:
        self.deadlines = RunDeadlines()
        #: Runs of which an event was applied since the last look.
        self.touched: set[str] = set()
        self._places: dict[str, int] = {}
        self._ready: dict[str, ReadyRuns] = {}

    def add(self, run: Run) -> None:
        """Add a run."""
        self._places[run.name] = len(self._places)
        self._ready.setdefault(run.spec.pool, ReadyRuns())
        self.touched.add(run.name)

    def refresh(self, runs: dict[str, Run], deadline_of: Callable[[Run], float | None]) -> None:
        """Look again at the touched runs."""
        for name in self.touched:
            run = runs[name]
            self.deadlines.place(run, deadline_of(run))
        self._place_ready(runs)
        self.touched.clear()

    def ready(self, pool: str, runs: dict[str, Run]) -> ReadyRuns | None:
        """The runs of a pool that have queued episodes."""
        self._place_ready(runs)
        return self._ready.get(pool)

    def _place_ready(self, runs: dict[str, Run]) -> None:
        for name in self.touched:
            run = runs[name]
            self._ready[run.spec.pool].place(self._places[name], run)

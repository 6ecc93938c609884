"""Workers: the last request of each, its attempts, and the time at which the first of its leases may run out.

All of it is soft except the attempts, which events assign to their workers, and the draining workers.

* A drain is over when its worker is gone; a later process of the same name gets work.
* A lease only gets longer, so the watched moment of a worker is never too late; one that is too early costs one check.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

from headrace_orchestrator.scheduler.state.groups import Episode

GONE_S = 60.0
"""Seconds after which a silent worker that holds nothing is forgotten: two default lease terms."""


class WorkerState:
    """A worker."""

    __slots__ = ("attempts", "capabilities", "heard", "listed", "name", "pool", "seen", "slots", "stats", "watched")

    def __init__(self, name: str, pool: str, now: float) -> None:
        self.name = name
        self.pool = pool
        self.capabilities: frozenset[str] = frozenset()
        self.slots = 0
        self.attempts: dict[str, Episode] = {}
        self.seen = now
        #: Whether it sent a request since this process began; the slots of a worker known from the log alone are not.
        self.heard = False
        #: When it last listed its attempts.
        self.listed = -math.inf
        self.stats: dict[str, float] = {}
        #: When its leases are checked next; None if it holds nothing.
        self.watched: float | None = None


class Workers:
    """All workers by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, WorkerState] = {}
        self.draining: set[str] = set()
        #: Slots of the workers of each pool that take work.
        self.slots: Counter[str] = Counter()
        #: Moments and names; of a worker's entries only the one at ``WorkerState.watched`` counts.
        self._heap: list[tuple[float, str]] = []
        self._swept = 0.0

    def named(self, name: str, pool: str, now: float) -> WorkerState:
        """The worker of that name; a new one if it is not known."""
        worker = self.by_name.get(name)
        if worker is None:
            worker = self.by_name[name] = WorkerState(name, pool, now)
        return worker

    def hear_from(self, name: str, pool: str, slots: int, now: float) -> WorkerState:
        """Record that a worker sent a request."""
        worker = self.named(name, pool, now)
        worker.seen = now
        worker.heard = True
        if worker.slots != slots or worker.pool != pool:
            self.slots[worker.pool] -= worker.slots
            self.slots[pool] += slots
            worker.slots = slots
            worker.pool = pool
        return worker

    def watch(self, worker: WorkerState, deadline: float) -> None:
        """Check its leases at ``deadline``, unless an earlier check is due."""
        if worker.watched is None or deadline < worker.watched:
            worker.watched = deadline
            heapq.heappush(self._heap, (deadline, worker.name))

    def expired(self, now: float) -> list[Episode]:
        """Attempts whose leases have run out. The others are watched again."""
        expired: list[Episode] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            moment, name = heapq.heappop(heap)
            worker = self.by_name.get(name)
            if worker is None or worker.watched != moment:
                continue
            worker.watched = None
            overdue = [episode for episode in worker.attempts.values() if episode.deadline <= now]
            expired.extend(overdue)
            later = min((e.deadline for e in worker.attempts.values() if e.deadline > now), default=None)
            if later is not None:
                self.watch(worker, later)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest moment at which ``expired`` may find attempts."""
        heap = self._heap
        while heap:
            moment, name = heap[0]
            worker = self.by_name.get(name)
            if worker is not None and worker.watched == moment:
                return moment
            heapq.heappop(heap)
        return None

    def sweep(self, now: float) -> list[str]:
        """Forget workers that are gone; returns those that were draining."""
        if now - self._swept < GONE_S / 4:
            return []
        self._swept = now
        gone = [name for name in self.by_name if self.is_gone(name, now)]
        for name in gone:
            worker = self.by_name.pop(name)
            self.slots[worker.pool] -= worker.slots
        return [name for name in gone if name in self.draining]

    def is_gone(self, name: str, now: float) -> bool:
        """True if the worker of that name holds nothing and has been silent for ``GONE_S``."""
        worker = self.by_name.get(name)
        return worker is None or (not worker.attempts and now - worker.seen > GONE_S)

    def live(self, pool: str, now: float) -> list[WorkerState]:
        """Workers of a pool that sent a request within ``GONE_S``."""
        return [w for w in self.by_name.values() if w.pool == pool and w.heard and now - w.seen <= GONE_S]

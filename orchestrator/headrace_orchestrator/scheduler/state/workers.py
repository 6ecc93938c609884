"""Workers: the last request of each, its attempts, and the time at which the first of its leases may run out.

All of it is soft except the attempts, which events assign to their workers, and the drained workers.

* A worker that sent nothing for a lease term is silent, and its slots do not count, until it is heard again.
* A drain is over when its worker is gone; a later process of the same name gets work.
* A process is told from its name by its instance; the requests of one whose name another took are recognized.
* A lease only gets longer, so the watched moment of a worker is never too late; one that is too early costs one check.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from headrace_orchestrator.scheduler.state.groups import Episode

DEFAULT_TERM_S = 30.0
"""Lease term of a pool without runs."""

GONE_S = 60.0
"""Seconds after which a silent worker that holds nothing is forgotten: two default lease terms."""

SWEEP_S = 1.0
"""Seconds between two checks of all workers."""

REMEMBERED_INSTANCES = 16
"""Earlier processes of a name whose late requests are recognized."""


class WorkerState:
    """A worker."""

    __slots__ = (
        "attempts",
        "capabilities",
        "heard",
        "instance",
        "listed",
        "name",
        "pool",
        "replaced",
        "seen",
        "silent",
        "slots",
        "stats",
        "term_s",
        "watched",
    )

    def __init__(self, name: str, pool: str, now: float) -> None:
        self.name = name
        self.pool = pool
        self.capabilities: frozenset[str] = frozenset()
        self.slots = 0
        self.attempts: dict[str, Episode] = {}
        self.seen = now
        #: The lease term in which it sends several heartbeats: the pool's shortest when it was last told.
        self.term_s = DEFAULT_TERM_S
        #: Whether its slots do not count, because it was silent at the last check.
        self.silent = False
        #: Whether it sent a request since this process began; the slots of a worker known from the log alone are not.
        self.heard = False
        #: The process that has the name; empty if it is not known. Earlier ones, latest last.
        self.instance = ""
        self.replaced: deque[str] = deque(maxlen=REMEMBERED_INSTANCES)
        #: When it last listed its attempts.
        self.listed = -math.inf
        self.stats: dict[str, float] = {}
        #: When its leases are checked next; None if it holds nothing.
        self.watched: float | None = None

    @property
    def process(self) -> str:
        """The name of its process, with the instance if it has one: a supervisor may give a name to many processes."""
        return f"{self.name} (process {self.instance})" if self.instance else self.name

    def take_over(self, instance: str) -> None:
        """Record that another process has the name."""
        self.replaced.append(self.instance)
        self.instance = instance
        self.listed = -math.inf
        self.stats = {}


class Workers:
    """All workers by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, WorkerState] = {}
        self.draining: set[str] = set()
        #: Workers that were drained, by the keys of the requests.
        self.drain_keys: dict[str, str] = {}
        #: Slots of the workers of each pool that are not silent.
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
        if worker.silent or worker.slots != slots or worker.pool != pool:
            self.slots[worker.pool] -= 0 if worker.silent else worker.slots
            self.slots[pool] += slots
            worker.slots, worker.pool, worker.silent = slots, pool, False
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
        """Stop counting the slots of silent workers, and forget those that are gone; returns those of them that were
        draining."""
        if now - self._swept < SWEEP_S:
            return []
        self._swept = now
        for worker in self.by_name.values():
            if not worker.silent and self.is_silent(worker, now):
                worker.silent = True
                self.slots[worker.pool] -= worker.slots
        gone = [name for name in self.by_name if self.is_gone(name, now)]
        for name in gone:
            worker = self.by_name.pop(name)
            self.slots[worker.pool] -= 0 if worker.silent else worker.slots
        return [name for name in gone if name in self.draining]

    def is_gone(self, name: str, now: float) -> bool:
        """True if the worker of that name holds nothing and has been silent for ``GONE_S``."""
        worker = self.by_name.get(name)
        return worker is None or (not worker.attempts and now - worker.seen > GONE_S)

    def is_silent(self, worker: WorkerState, now: float) -> bool:
        """True if it sent nothing for a lease term, so that its leases have run out."""
        return now - worker.seen >= worker.term_s

    def live(self, pool: str, now: float) -> list[WorkerState]:
        """Workers of a pool that were heard and are not silent."""
        return [w for w in self.by_name.values() if w.pool == pool and w.heard and not self.is_silent(w, now)]

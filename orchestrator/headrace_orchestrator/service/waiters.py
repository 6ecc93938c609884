"""Long polls: queues of waiting requests, and the events that wake them.

* A change wakes the first waiter; a waiter that finds work wakes the next.
* A wake-up is never lost: a waiter that leaves passes it on.
* A client that disconnects ends its wait at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from headrace.wire.messages import LeaseRequest
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    AttemptCancelled,
    Dispatched,
    RunClosed,
    WorkerDraining,
)

Disconnected = Callable[[], "asyncio.Task[None]"]
"""Gives the task that is done when the client has disconnected. Only a request that waits calls it."""

FOR_ALL_WORKERS = frozenset((AttemptCancelled, RunClosed, WorkerDraining))
"""Events that wake every waiting worker, not only the first."""


class ClientDisconnected(Exception):
    """The client closed the connection before its response."""


class WaitQueue:
    """Waiters in the order of their arrival."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake_first(self) -> None:
        """Wake the first waiter."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake all waiters."""
        while self._waiters:
            self.wake_first()

    async def wait(self, timeout_s: float, disconnected: Disconnected) -> None:
        """Wait for a wake-up, or until the time is over. Raises ClientDisconnected."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        gone = disconnected()
        finished = False
        try:
            await asyncio.wait((waiter, gone), timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnected
            finished = True
        finally:
            if not waiter.done():
                waiter.cancel()
                self._waiters.remove(waiter)
            elif not finished:
                self.wake_first()


class WaitQueues:
    """Queues for each run, for its pulls and for its policy servers, and one for each kind of worker."""

    def __init__(self) -> None:
        self._runs: dict[str, WaitQueue] = {}
        self._pulls: dict[str, WaitQueue] = {}
        self._policy_servers: dict[str, WaitQueue] = {}
        self._workers: dict[tuple[str, tuple[str, ...]], WaitQueue] = {}

    def for_run(self, run: str) -> WaitQueue:
        """The queue that every event of the run wakes."""
        return self._runs.setdefault(run, WaitQueue())

    def for_pulls(self, run: str) -> WaitQueue:
        """The queue of the run's pulls, which every event of the run wakes."""
        return self._pulls.setdefault(run, WaitQueue())

    def for_policy_servers(self, run: str) -> WaitQueue:
        """The queue that a change of the run's policy servers wakes."""
        return self._policy_servers.setdefault(run, WaitQueue())

    def for_worker(self, request: LeaseRequest) -> WaitQueue:
        """The queue of workers that offer the same as this one."""
        return self._workers.setdefault((request.pool, tuple(sorted(request.capabilities))), WaitQueue())

    def notify(self, events: Sequence[AnyEvent]) -> None:
        """Wake the waiters that these events concern."""
        kinds = {type(event) for event in events} - {Dispatched}
        for run in {event.run for event in events if not isinstance(event, (Dispatched, WorkerDraining))}:
            for queues in (self._runs, self._pulls):
                queue = queues.get(run)
                if queue is not None:
                    queue.wake_all()
        if kinds & FOR_ALL_WORKERS:
            for queue in self._workers.values():
                queue.wake_all()
        elif kinds:
            self.offer_work()

    def offer_work(self) -> None:
        """Wake the first worker of each kind."""
        for queue in self._workers.values():
            queue.wake_first()

    def wake_all(self) -> None:
        """Wake all waiters."""
        queues = (self._runs, self._pulls, self._policy_servers, self._workers)
        for queue in chain.from_iterable(group.values() for group in queues):
            queue.wake_all()

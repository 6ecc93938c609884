"""Long polls: who waits for what, and who is woken.

* A change wakes the first in line; who finds work wakes the next.
* A wake-up is never lost: a waiter that leaves passes it on.
* A client that leaves ends its wait at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headrace.wire.messages import LeaseRequest
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    AttemptCancelled,
    Dispatched,
    RunClosed,
    WorkerDraining,
)

Left = Callable[[], "asyncio.Task[None]"]
"""Gives the task that is done when the client has left; called only by those who wait."""

FOR_ALL_WORKERS = frozenset((AttemptCancelled, RunClosed, WorkerDraining))
"""Events that workers other than the first in line want to know at once."""


class ClientDisconnected(Exception):
    """The client closed the connection; there is nobody to answer."""


class Bell:
    """Waiters in the order in which they came."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def ring(self) -> None:
        """Wake the first in line."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def ring_all(self) -> None:
        """Wake all."""
        while self._waiters:
            self.ring()

    async def wait(self, timeout_s: float, left: Left) -> None:
        """Until the bell rings, the time is over, or the client has left. Raises ClientDisconnected for the last."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        gone = left()
        heard = False
        try:
            await asyncio.wait((waiter, gone), timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnected
            heard = True
        finally:
            if not waiter.done():
                waiter.cancel()
                self._waiters.remove(waiter)
            elif not heard:
                self.ring()


class Bells:
    """Bells for each run and for its policy servers, and one for each kind of worker."""

    def __init__(self) -> None:
        self._runs: dict[str, Bell] = {}
        self._servers: dict[str, Bell] = {}
        self._workers: dict[tuple[str, tuple[str, ...]], Bell] = {}

    def of_run(self, run: str) -> Bell:
        """Rung when something happens in the run."""
        return self._runs.setdefault(run, Bell())

    def of_servers(self, run: str) -> Bell:
        """Rung when something happens to the run's policy servers."""
        return self._servers.setdefault(run, Bell())

    def of_worker(self, request: LeaseRequest) -> Bell:
        """Rung when there may be work for a worker like this one."""
        return self._workers.setdefault((request.pool, tuple(sorted(request.capabilities))), Bell())

    def tell(self, events: Sequence[AnyEvent]) -> None:
        """Wake those whom these events concern."""
        news = {type(event) for event in events} - {Dispatched}
        for run in {event.run for event in events if not isinstance(event, (Dispatched, WorkerDraining))}:
            bell = self._runs.get(run)
            if bell is not None:
                bell.ring_all()
        if news & FOR_ALL_WORKERS:
            for bell in self._workers.values():
                bell.ring_all()
        elif news:
            self.offer_work()

    def offer_work(self) -> None:
        """Wake the first in line of each kind of worker."""
        for bell in self._workers.values():
            bell.ring()

    def ring_all(self) -> None:
        """Wake everybody."""
        for bell in (*self._runs.values(), *self._servers.values(), *self._workers.values()):
            bell.ring_all()

"""Driving flows over blocking sockets, in the caller's thread and in the one that renews leases.

* While batches are held, their leases are renewed.
* A renewal that fails is tried again, and repeats what the learner said.

The thread is a daemon: it dies with the process, and with it the leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.client.connection_pool import ConnectionPool
from headrace.client.operations import Operations
from headrace.client.requests import ApiResponse, Operation, Sleep, TransportFailure
from headrace.errors import HeadraceError

T = TypeVar("T")

log = logging.getLogger("headrace.client.sync_client")

CLOSE_S = 5.0
"""How long ``close`` waits for a renewal under way; the thread is a daemon, so nothing hangs on it afterwards."""


def run_operation(flow: Operation[T], connections: ConnectionPool, sleep: Callable[[float], None] = time.sleep) -> T:
    """Run a flow to its end; what it raises passes through."""
    answer: ApiResponse | TransportFailure | None = None
    try:
        while True:
            asked = flow.send(answer)
            if isinstance(asked, Sleep):
                answer = None
                sleep(asked.seconds)
            else:
                answer = connections.send(asked)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        flow.close()


class LeaseRenewer:
    """One daemon thread, started with the first batch that is held."""

    def __init__(self, flows: Operations, connections: ConnectionPool) -> None:
        self._flows = flows
        self._connections = connections
        self._changed = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """A batch is held that may be due sooner than those before."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="headrace-keepalive", daemon=True)
                self._thread.start()
        self._changed.set()

    def close(self) -> None:
        """Stop; returns when the thread has ended, or is stuck in a renewal for ``CLOSE_S``."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._changed.set()
        if thread is not None:
            thread.join(CLOSE_S)

    def _loop(self) -> None:
        while not self._closed:
            self._changed.wait(self._flows.leases.next_due_s())
            self._changed.clear()
            for run in self._flows.leases.due():
                if self._closed:
                    return
                self._renew(run)

    def _renew(self, run: str) -> None:
        try:
            run_operation(self._flows.renew(run), self._connections)
        except HeadraceError as error:
            log.warning("The batch leases of run %r could not be renewed: %s", run, error)

"""The background thread of the sync client that renews batch leases.

* While batches are held, their leases are renewed.
* A failed renewal is repeated, and each renewal reports the learner's last activity.

The thread is a daemon: it dies with the process, and the leases then expire.
"""

from __future__ import annotations

import logging
import threading
import time

from headrace.client.connection_pool import ConnectionPool
from headrace.client.operations import Operations
from headrace.client.requests import run_operation
from headrace.errors import HeadraceError

log = logging.getLogger("headrace.client.sync_client")

CLOSE_TIMEOUT_S = 5.0
"""Longest wait of ``close`` for a running renewal. The thread is a daemon, so it never keeps the process alive."""


class LeaseRenewer:
    """A daemon thread, started when the first batch is held."""

    def __init__(self, operations: Operations, connections: ConnectionPool) -> None:
        self._operations = operations
        self._connections = connections
        self._changed = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Consider a batch that was just served: its lease may be due before those of the others."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._loop, name="headrace-keepalive", daemon=True)
                self._thread.start()
        self._changed.set()

    def close(self) -> None:
        """Stop the thread. Waits for it to end, at most ``CLOSE_TIMEOUT_S``."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._changed.set()
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)

    def _loop(self) -> None:
        while not self._closed:
            self._changed.wait(self._operations.leases.next_due_s())
            self._changed.clear()
            for run in self._operations.leases.due():
                if self._closed:
                    return
                self._renew(run)

    def _renew(self, run: str) -> None:
        try:
            run_operation(self._operations.renew(run), self._connections.send, time.sleep)
        except HeadraceError as error:
            log.warning("The batch leases of run %r could not be renewed: %s", run, error)

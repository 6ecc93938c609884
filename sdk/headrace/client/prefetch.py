"""Prefetching: the next batch is fetched while the learner trains on the current one.

* A prefetched batch costs the training loop nothing; waiting for one costs the same as a pull.
* The number of batches held beside the current one is bounded.
* Batches that were fetched and not used are given back when the loop ends, however it ends.
* An error of a pull, including the end of the run, is raised after the batches before it were delivered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.batch.batch import Batch
from headrace.client.connection_pool import ConnectionPool
from headrace.client.lease_renewal import CLOSE_TIMEOUT_S
from headrace.client.requests import ApiRequest, ApiResponse, Operation, TransportFailure, run_operation
from headrace.client.wait_reports import WaitCallback, report_wait, timeout_error
from headrace.errors import InvalidRequest
from headrace.wire import messages

UNUSED_REASON = "prefetched and not used"
"""The reason with which batches are given back."""


class _PullCancelled(Exception):
    """Ends a pull whose result is no longer needed."""


class _CancellablePool(ConnectionPool):
    """The prefetch thread's own connections and sleep; ``cancelled`` ends both at once."""

    def __init__(self, like: ConnectionPool) -> None:
        super().__init__(like.origin, like.token)
        self.cancelled = threading.Event()

    def send(self, request: ApiRequest) -> ApiResponse | TransportFailure:
        response = super().send(request)
        if self.cancelled.is_set():
            raise _PullCancelled
        return response

    def sleep(self, seconds: float) -> None:
        if self.cancelled.wait(seconds):
            raise _PullCancelled


class Prefetcher:
    """A daemon thread that keeps up to ``depth`` batches of a run ready. ``pull`` makes the operation of one pull;
    ``give_back`` is called for each batch that was not used."""

    def __init__(
        self,
        run: str,
        pull: Callable[[WaitCallback], Operation[Batch]],
        give_back: Callable[[Batch], None],
        connections: ConnectionPool,
        depth: int,
    ) -> None:
        self._run = run
        self._pull = pull
        self._give_back = give_back
        self._connections = _CancellablePool(connections)
        self._free = threading.Semaphore(depth)
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._reasons: list[messages.Reason] = []
        self._has_new_reasons = False
        self._thread = threading.Thread(target=self._loop, name="headrace-prefetch", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float | None, on_wait: WaitCallback | None) -> Batch:
        """The next batch. Raises the error of its pull, or NothingToServe at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._ready or self._error or self._has_new_reasons, remaining_s)
                if self._ready:
                    self._free.release()
                    return self._ready.popleft()
                if self._error is not None:
                    raise self._error
                if not self._has_new_reasons:
                    raise timeout_error(self._run, timeout_s or 0.0, self._reasons)
                self._has_new_reasons = False
            report_wait(on_wait, self._run, self._reasons)

    def close(self) -> None:
        """End the thread and give back the unused batches."""
        self._connections.cancelled.set()
        self._free.release()
        self._connections.abort()
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._changed:
            unused, self._ready = self._ready, deque()
            self._error = self._error or InvalidRequest("The client was closed.", hint="Make another one.")
            self._changed.notify_all()
        for batch in unused:
            self._give_back(batch)

    def _loop(self) -> None:
        while True:
            self._free.acquire()
            if self._connections.cancelled.is_set():
                return
            try:
                batch = run_operation(self._pull(self._set_reasons), self._connections.send, self._connections.sleep)
            except _PullCancelled:
                return
            except BaseException as error:  # noqa: BLE001 - ``take`` raises it in the training loop
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(batch)
                self._changed.notify_all()

    def _set_reasons(self, run: str, reasons: list[messages.Reason]) -> None:
        with self._changed:
            self._reasons, self._has_new_reasons = reasons, True
            self._changed.notify_all()

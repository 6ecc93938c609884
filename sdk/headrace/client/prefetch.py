"""Pulling ahead: the next batch is fetched while the learner trains on this one.

* A batch that is there costs the training loop nothing; waiting for one costs what a pull would.
* At most so many batches are held beside the one in hand.
* What was fetched and not used is given back when the loop ends, however it ends.
* What a pull raised, the end of the run included, is raised in the loop once what came before it was handed out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.batch.batch import Batch
from headrace.client.connection_pool import ConnectionPool
from headrace.client.lease_renewal import CLOSE_S, run_operation
from headrace.client.requests import ApiRequest, ApiResponse, Operation, TransportFailure
from headrace.client.wait_reports import WaitCallback, report_wait, timeout_error
from headrace.errors import InvalidRequest
from headrace.wire import messages

UNUSED_REASON = "prefetched and not used"
"""Reason with which batches are given back."""


class _PullCancelled(Exception):
    """Ends a pull that nobody waits for any more."""


class _CancellablePool(ConnectionPool):
    """A thread's own connections, and its sleep: both end at once when the loop does."""

    def __init__(self, like: ConnectionPool) -> None:
        super().__init__(like.origin, like.token)
        self.ended = threading.Event()

    def send(self, request: ApiRequest) -> ApiResponse | TransportFailure:
        answer = super().send(request)
        if self.ended.is_set():
            raise _PullCancelled
        return answer

    def sleep(self, seconds: float) -> None:
        if self.ended.wait(seconds):
            raise _PullCancelled


class Prefetcher:
    """A daemon thread that keeps up to ``ahead`` batches of a run ready. ``pull`` makes the flow of one pull;
    ``give_back`` is called for each batch that nobody took."""

    def __init__(
        self,
        run: str,
        pull: Callable[[WaitCallback], Operation[Batch]],
        give_back: Callable[[Batch], None],
        connections: ConnectionPool,
        ahead: int,
    ) -> None:
        self._run = run
        self._pull = pull
        self._give_back = give_back
        self._connections = _CancellablePool(connections)
        self._room = threading.Semaphore(ahead)
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._reasons: list[messages.Reason] = []
        self._news = False
        self._thread = threading.Thread(target=self._loop, name="headrace-prefetch", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float | None, on_wait: WaitCallback | None) -> Batch:
        """The next batch; raises what its pull raised, and NothingToServe at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                left = None if deadline is None else deadline - time.monotonic()
                while not (self._ready or self._error or self._news) and (left is None or left > 0):
                    self._changed.wait(left)
                    left = None if deadline is None else deadline - time.monotonic()
                if self._ready:
                    self._room.release()
                    return self._ready.popleft()
                if self._error is not None:
                    raise self._error
                if not self._news:
                    raise timeout_error(self._run, timeout_s or 0.0, self._reasons)
                self._news = False
            report_wait(on_wait, self._run, self._reasons)

    def close(self) -> None:
        """End the thread and give back what nobody took."""
        self._connections.ended.set()
        self._room.release()
        self._connections.abort()
        self._thread.join(CLOSE_S)
        with self._changed:
            unused, self._ready = self._ready, deque()
            self._error = self._error or InvalidRequest("The client was closed.", hint="Make another one.")
            self._changed.notify_all()
        for batch in unused:
            self._give_back(batch)

    def _loop(self) -> None:
        while True:
            self._room.acquire()
            if self._connections.ended.is_set():
                return
            try:
                batch = run_operation(self._pull(self._note), self._connections, self._connections.sleep)
            except _PullCancelled:
                return
            except BaseException as error:  # noqa: BLE001 - it is raised in the loop that takes the batches
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(batch)
                self._changed.notify_all()

    def _note(self, run: str, reasons: list[messages.Reason]) -> None:
        with self._changed:
            self._reasons, self._news = reasons, True
            self._changed.notify_all()

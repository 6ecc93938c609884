"""Threads for blocking environments.

* A blocking environment occupies its own thread and nothing else.
* A call that exceeds its deadline is abandoned: its thread is replaced and its late result is discarded.
* Waiting for a thread is measured separately from running on one.
* Abandoned calls that have not returned yet are counted; the worker limits their number.

Each concurrent call has a thread: at most one per slot of the worker, and one per abandoned call until it returns. The
standard library's pool joins its threads at exit and never replaces a hanging one; these are daemon threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from headrace.common.timeouts import timeout


class CallAbandonedError(Exception):
    """Raised when a call exceeds its deadline. Its thread continues alone, and its late result is discarded."""


class ThreadCallOutcome(NamedTuple):
    """The result or exception of a call, with its waiting and running time in seconds."""

    result: Any
    error: BaseException | None
    waiting_s: float
    working_s: float


class EnvironmentThreads:
    """A pool of reusable threads. ``clock`` is monotonic, in seconds, and read from all threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._idle: list[_Thread] = []
        self.running = 0
        """Calls that are awaited now."""
        self.abandoned = 0
        """Calls abandoned since the start (late, or their episode was cancelled)."""
        self.hanging = 0
        """Abandoned calls that have not returned yet. Each occupies a thread."""

    async def run(self, call: Callable[[], Any], timeout_s: float) -> ThreadCallOutcome:
        """Run a call on a thread. Raises CallAbandonedError after ``timeout_s``; returns the call's own exception."""
        thread = self._idle.pop() if self._idle else _Thread(self._clock)
        future: asyncio.Future[ThreadCallOutcome] = asyncio.get_running_loop().create_future()
        self.running += 1
        thread.start_call(call, future, self._count_return)
        try:
            async with timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise CallAbandonedError from error
        finally:
            self.running -= 1
            if future.cancelled():
                self.abandoned += 1
                self.hanging += 1
                thread.end()
            else:
                self._idle.append(thread)

    def _count_return(self) -> None:
        self.hanging -= 1

    def close(self) -> None:
        """Let idle threads end."""
        for thread in self._idle:
            thread.end()
        self._idle.clear()


class _Call(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[ThreadCallOutcome]
    on_late: Callable[[], None]
    requested_at: float


class _Thread:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def start_call(
        self, call: Callable[[], Any], future: asyncio.Future[ThreadCallOutcome], on_late: Callable[[], None]
    ) -> None:
        """Start a call. ``on_late`` is called in the event loop if it returns after its future was cancelled."""
        self._calls.put(_Call(call, future, on_late, self._clock()))

    def end(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            _deliver(item, self._run(item.call, item.requested_at))
            del item

    def _run(self, call: Callable[[], Any], requested_at: float) -> ThreadCallOutcome:
        started_at = self._clock()
        result: Any = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - passed to the caller, which reports it
            error = raised
        return ThreadCallOutcome(result, error, started_at - requested_at, self._clock() - started_at)


def _deliver(item: _Call, outcome: ThreadCallOutcome) -> None:
    def settle() -> None:
        if item.future.done():
            _discard(outcome.result)
            item.on_late()
        else:
            item.future.set_result(outcome)

    try:
        item.future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        # The loop is closed: an abandoned call returned after the end of the worker.
        _discard(outcome.result)


def _discard(result: Any) -> None:
    """Close a coroutine, because Python warns about one that is never awaited."""
    if inspect.iscoroutine(result):
        result.close()

"""Threads for blocking environments.

* A blocking environment occupies its own thread and nothing else.
* A call that exceeds its deadline is abandoned: its thread is replaced and its late result is discarded.
* Waiting for a thread is measured apart from running on one.
* Abandoned calls that have not returned yet are counted; the worker bounds them.

Each concurrent call has a thread: at most one for each slot of the worker, and one for each abandoned call until it
ends. The standard library's pool joins its threads at exit and never replaces a hanging one; these are daemon threads.
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


class Ran(NamedTuple):
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

    async def run(self, call: Callable[[], Any], timeout_s: float) -> Ran:
        """Run a call on a thread. Raises CallAbandonedError after ``timeout_s``; returns the call's own exception."""
        thread = self._idle.pop() if self._idle else _Thread(self._clock)
        future: asyncio.Future[Ran] = asyncio.get_running_loop().create_future()
        self.running += 1
        thread.start_call(call, future, self._came_back)
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

    def _came_back(self) -> None:
        self.hanging -= 1

    def close(self) -> None:
        """Let idle threads end."""
        for thread in self._idle:
            thread.end()
        self._idle.clear()


class _Call(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[Ran]
    on_late: Callable[[], None]
    asked_at: float


class _Thread:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def start_call(self, call: Callable[[], Any], future: asyncio.Future[Ran], on_late: Callable[[], None]) -> None:
        """Start a call. ``on_late`` is called in the event loop if it returns after its future was cancelled."""
        self._calls.put(_Call(call, future, on_late, self._clock()))

    def end(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            _deliver(item, self._ran(item.call, item.asked_at))
            del item

    def _ran(self, call: Callable[[], Any], asked_at: float) -> Ran:
        started_at = self._clock()
        result: Any = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - carried to the caller, which names it
            error = raised
        return Ran(result, error, started_at - asked_at, self._clock() - started_at)


def _deliver(item: _Call, ran: Ran) -> None:
    def settle() -> None:
        if item.future.done():
            _discard(ran.result)
            item.on_late()
        else:
            item.future.set_result(ran)

    try:
        item.future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        # The loop is closed: the worker has ended, and an abandoned call returned after it.
        _discard(ran.result)


def _discard(result: Any) -> None:
    """Close a coroutine: Python warns of one that nobody awaits."""
    if inspect.iscoroutine(result):
        result.close()

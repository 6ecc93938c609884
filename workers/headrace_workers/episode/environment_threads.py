"""Threads for environments that block.

* A blocking environment holds its own thread and nothing else.
* A call that does not come back in time is abandoned: its thread is replaced and its late result is discarded.
* Waiting for a thread is measured apart from running on one.
* Abandoned calls that have not come back yet are counted; a worker bounds them.

There are as many threads as calls at a time, so at most one for each slot of the worker, and one for each abandoned
call until it ends. The standard pool joins its threads when the process ends and never replaces one that hangs; these
are daemon threads.
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
    """The call did not come back in time. Its thread goes on alone, and its late result is discarded."""


class Ran(NamedTuple):
    """What a call returned, or raised; and how long it waited and ran, in seconds."""

    result: Any
    error: BaseException | None
    waiting_s: float
    working_s: float


class EnvironmentThreads:
    """Threads that are used again. ``clock`` is monotonic, in seconds, and read from all threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._idle: list[_Thread] = []
        self.running = 0
        """Calls that somebody waits for now."""
        self.abandoned = 0
        """Calls that nobody waits for any more (late, or their episode was cancelled), since the start."""
        self.hanging = 0
        """Abandoned calls that have not come back yet. Each holds a thread."""

    async def run(self, call: Callable[[], Any], timeout_s: float) -> Ran:
        """Run a call on a thread. Raises CallAbandonedError after ``timeout_s``; what the call raises is returned."""
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
        """``on_late`` is called in the event loop if the call comes back after its future was cancelled."""
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
        # The loop is closed: the worker has ended, and an abandoned call came back after it.
        _discard(ran.result)


def _discard(result: Any) -> None:
    """Close a coroutine: Python warns of one that nobody awaits."""
    if inspect.iscoroutine(result):
        result.close()

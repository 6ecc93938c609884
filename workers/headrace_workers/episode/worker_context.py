"""The environment context in a worker: its sandbox, its threads and its bounded calls.

* Time that a call waits for a sandbox, a thread or the process of a bounded call is measured apart from its working
  time.
* After a call was abandoned on its thread, the environment gets no more calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.episode.environment_threads import CallAbandonedError, EnvironmentThreads
from headrace_workers.sandboxes import EpisodeSandbox

T = TypeVar("T")


class WorkerContext:
    """The context of one episode's environment. ``timeout_s``: the limit of a call on a thread."""

    def __init__(
        self, sandbox: EpisodeSandbox, threads: EnvironmentThreads, calls: BoundedCalls, timeout_s: float
    ) -> None:
        self.sandbox = sandbox
        self._calls = calls
        self._threads = threads
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self.hangs = False
        """True after a call was abandoned on its thread."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on a thread, and raise what it raises."""
        try:
            outcome = await self._threads.run(lambda: function(*arguments), self._timeout_s)
        except (CallAbandonedError, asyncio.CancelledError):
            self.hangs = True
            raise
        self._waited_s += outcome.waiting_s
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.result)

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """Call a function in a separate process. Raises LimitExceeded, EnvironmentFailure."""
        steps = self.sandbox.steps
        with steps.outside_call():
            return await self._calls.call(
                function, *arguments, time_s=time_s, memory_bytes=memory_bytes, on_work=steps.add_work
            )

    def begin(self, deadline: asyncio.Timeout) -> None:
        """Begin a step with this deadline."""
        self.sandbox.steps.deadline = deadline

    def take_waited_s(self) -> float:
        """End the step and return its waiting time."""
        waited_s = self._waited_s + self.sandbox.steps.waited_s
        self.sandbox.steps.deadline = None
        self._waited_s = self.sandbox.steps.waited_s = 0.0
        return waited_s

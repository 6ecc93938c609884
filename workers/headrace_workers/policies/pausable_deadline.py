"""A deadline that stops while the policy servers are paused for new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from headrace.common.timeouts import timeout


class Deadline:
    """An ``async with`` block that raises TimeoutError after ``timeout_s`` seconds, not counting pauses.

    ``paused_s`` returns the seconds of pause since the block was entered; it may grow between calls.
    """

    def __init__(self, timeout_s: float, paused_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._paused_s = paused_s
        self._scope = timeout(None)
        self.expired = False

    async def __aenter__(self) -> Deadline:
        await self._scope.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._timer = self._loop.call_later(self._timeout_s, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _check(self) -> None:
        now = self._loop.time()
        left_s = self._timeout_s + self._paused_s() - (now - self._started_at)
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        else:
            self.expired = True
            self._scope.reschedule(now)

"""``asyncio.timeout`` that also raises TimeoutError in a task that is being cancelled.

* In a task that is being cancelled, such as one in its cleanup, TimeoutError is raised when the time is over.
* A cancellation from elsewhere stays a CancelledError.

Before Python 3.11.3 ``asyncio.timeout`` raises CancelledError in such a task, so that code after it, which would kill
what did not end in time, never runs.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Timeout(asyncio.Timeout):  # type: ignore[misc]  # final for type checkers only
    """``asyncio.Timeout`` with the behavior of Python 3.11.3."""

    async def __aenter__(self) -> Timeout:
        await super().__aenter__()
        self._cancelled = _cancelled()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        if kind is asyncio.CancelledError and self.expired() and _cancelled() <= self._cancelled:
            raise TimeoutError from error


def _cancelled() -> int:
    """The number of pending cancellations of this task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _timeout(delay_s: float | None) -> Timeout:
    return Timeout(None if delay_s is None else asyncio.get_running_loop().time() + delay_s)


timeout = asyncio.timeout if sys.version_info >= (3, 11, 3) else _timeout
"""``asyncio.timeout``: takes seconds, or None for no timeout. Raises TimeoutError."""

"""``asyncio.timeout`` that says so when its time is over, in a task that is being cancelled too.

* In a task that is being cancelled, as one that cleans up, TimeoutError is raised when the time is over.
* A cancellation that comes from elsewhere stays one.

Before Python 3.11.3 ``asyncio.timeout`` raises CancelledError in such a task: whoever would kill what does not end in
time never comes to it.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Timeout(asyncio.Timeout):  # type: ignore[misc]  # it is final for type checkers only
    """As that of Python 3.11.3."""

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
    """How often this task was asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _timeout(delay_s: float | None) -> Timeout:
    return Timeout(None if delay_s is None else asyncio.get_running_loop().time() + delay_s)


timeout = asyncio.timeout if sys.version_info >= (3, 11, 3) else _timeout
"""As ``asyncio.timeout``: takes seconds, or None for no end. Raises TimeoutError."""

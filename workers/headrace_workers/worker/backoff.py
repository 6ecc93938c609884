"""Backoff between retries while the orchestrator is unavailable: pauses double up to a limit, with random jitter.

* The number of retries is unlimited, because an outage can last arbitrarily long.
* A refused token is logged as the cause and retried less often: a person has to fix it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from headrace.errors import Forbidden, HeadraceError, Unauthorized
from headrace_workers.worker.logs import logger

FIRST_S = 0.1
"""First pause. A restart of the orchestrator takes about a second, and early retries should notice its end."""

LAST_S = 5.0
"""Longest pause, and thus the longest delay until a worker notices that the orchestrator is available again."""

REFUSED_LAST_S = 30.0
"""Longest pause after a refusal."""


class Backoff:
    """Pauses of one sequence of retries. ``random_share`` returns a number in [0, 1)."""

    def __init__(
        self,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._sleep = sleep
        self._random_share = random_share
        self._next_s = FIRST_S

    async def pause(self, error: HeadraceError, *, longest_s: float = LAST_S) -> None:
        """Wait before the next retry: 50 to 100 % of the current pause, which is at most ``longest_s`` unless the error
        is a refusal."""
        refusal = refusal_message(error)
        last_s, longest_s = (REFUSED_LAST_S, REFUSED_LAST_S) if refusal else (LAST_S, longest_s)
        pause_s = min(self._next_s, longest_s) * (0.5 + 0.5 * self._random_share())
        self._next_s = min(last_s, self._next_s * 2)
        logger().warning(refusal or "trying again", error=str(error), pause_s=round(pause_s, 3))
        await self._sleep(pause_s)

    def reset(self) -> None:
        """Return to the first pause, after a success."""
        self._next_s = FIRST_S


def refusal_message(error: HeadraceError) -> str:
    """Log message if the orchestrator refused this worker; empty for other errors."""
    if isinstance(error, Unauthorized):
        return "the token was refused"
    return "the worker was refused" if isinstance(error, Forbidden) else ""

"""Pauses between tries while the orchestrator is away: they double up to a bound and are spread by chance.

* There is always another try: an outage ends when it ends.
* A token that is refused is named as the cause, and tried less often: a person has to mend it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from headrace.errors import Forbidden, HeadraceError, Unauthorized
from headrace_workers.worker.logs import logger

FIRST_S = 0.1
"""A restart of the orchestrator takes about a second; the first tries should catch its end."""

LAST_S = 5.0
"""The longest pause: so late a worker may notice that the orchestrator is back."""

REFUSED_LAST_S = 30.0
"""The longest pause after a refusal."""


class Backoff:
    """One sequence of tries. ``random_share`` gives a number in [0, 1)."""

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
        """Wait before the next try, between a half and the whole of the pause that is due, or of ``longest_s`` (which
        does not bound pauses after a refusal)."""
        refusal = refusal_message(error)
        last_s, longest_s = (REFUSED_LAST_S, REFUSED_LAST_S) if refusal else (LAST_S, longest_s)
        pause_s = min(self._next_s, longest_s) * (0.5 + 0.5 * self._random_share())
        self._next_s = min(last_s, self._next_s * 2)
        logger().warning(refusal or "trying again", error=str(error), pause_s=round(pause_s, 3))
        await self._sleep(pause_s)

    def reset(self) -> None:
        """It worked: start over with the first pause."""
        self._next_s = FIRST_S


def refusal_message(error: HeadraceError) -> str:
    """What to say where the orchestrator refuses this worker as such; else nothing."""
    if isinstance(error, Unauthorized):
        return "the token was refused"
    return "the worker was refused" if isinstance(error, Forbidden) else ""

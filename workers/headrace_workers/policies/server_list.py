"""Keeps a run's pool as the orchestrator tells, by a long poll for each run that is played here.

* The pool hears of a change as soon as the orchestrator knows of it.
* While the orchestrator is away the pool stays as it was, and is asked for again and again.
* A run that nobody plays any more is not followed any more, until somebody does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from headrace.errors import HeadraceError
from headrace.wire.messages import PolicyServersReply
from headrace_workers.policies.server_pools import KeptPool

ListServers = Callable[[str, int, float], Awaitable[PolicyServersReply]]
"""Asks the orchestrator for the servers of a run: its name, the revision that is known, and how long to wait."""

WAIT_S = 20.0
"""Long poll: below the idle limits of common proxies."""

SHORTEST_POLL_S = 0.05
"""Between two polls: an answer that comes at once, again and again, must not keep a processor busy."""

RETRY_S = 1.0
"""After a poll that got no answer."""

IDLE_S = 120.0
"""A run is followed for so long after its last turn: longer than an environment's usual step."""


class Follower:
    """Follows the servers of one run. Call ``used`` at each turn; ``on_change`` is called after each word of them."""

    def __init__(
        self, run: str, pool: KeptPool, ask: ListServers, on_change: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.pool = pool
        self._on_change = on_change
        self._run = run
        self._ask = ask
        self._clock = clock
        self._used_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def used(self) -> None:
        """A turn is about to be sampled: the pool is wanted."""
        self._used_at = self._clock()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Follow no longer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        revision = -1
        while self._clock() - self._used_at <= IDLE_S:
            try:
                reply = await self._ask(self._run, revision, WAIT_S)
            except HeadraceError:
                self.pool.miss()
                await asyncio.sleep(RETRY_S)
                continue
            self.pool.hear(reply)
            self._on_change()
            # Revision 0: the orchestrator keeps no list, and does not wait.
            await asyncio.sleep(SHORTEST_POLL_S if reply.revision else WAIT_S)
            revision = reply.revision

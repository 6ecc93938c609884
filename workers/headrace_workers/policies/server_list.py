"""The orchestrator's list of a run's policy servers, kept current by a long poll for each active run.

* The pool gets a change as soon as the orchestrator has it.
* While the orchestrator is unavailable the pool stays unchanged, and the poll is retried.
* A run without recent turns is not polled until its next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from headrace.errors import HeadraceError
from headrace.wire.messages import PolicyServersReply
from headrace_workers.policies.server_pools import ManagedPool

ListServers = Callable[[str, int, float], Awaitable[PolicyServersReply]]
"""Request to the orchestrator for the servers of a run: the run's name, the last revision, and the longest wait."""

WAIT_S = 20.0
"""Wait of the long poll, below the idle limits of common proxies."""

SHORTEST_POLL_S = 0.05
"""Shortest time between two polls, so that immediate answers do not keep a processor busy."""

RETRY_S = 1.0
"""Pause after a poll without an answer."""

IDLE_S = 120.0
"""Time for which a run is polled after its last turn; longer than the usual step of an environment."""


class ServerListPoller:
    """Polls the servers of one run. Call ``note_turn`` at each turn; ``on_change`` is called after each update."""

    def __init__(
        self, run: str, pool: ManagedPool, ask: ListServers, on_change: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.pool = pool
        self._on_change = on_change
        self._run = run
        self._ask = ask
        self._clock = clock
        self._last_turn_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def note_turn(self) -> None:
        """Record that a turn is about to be sampled, and start polling if needed."""
        self._last_turn_at = self._clock()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._poll())

    async def stop(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _poll(self) -> None:
        revision = -1
        while self._clock() - self._last_turn_at <= IDLE_S:
            try:
                reply = await self._ask(self._run, revision, WAIT_S)
            except HeadraceError:
                self.pool.mark_unreachable()
                await asyncio.sleep(RETRY_S)
                continue
            self.pool.update(reply)
            self._on_change()
            # Revision 0: the orchestrator manages no servers of this run, and answers at once.
            await asyncio.sleep(SHORTEST_POLL_S if reply.revision else WAIT_S)
            revision = reply.revision

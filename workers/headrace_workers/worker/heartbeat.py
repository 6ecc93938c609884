"""Heartbeat of the worker, on a separate thread and event loop.

* It continues while an episode blocks the worker's event loop.
* One heartbeat lists all attempts, including finished ones in the spool.
* The orchestrator sets the interval; a shorter lease term that arrives meanwhile shortens it.
* A lost heartbeat is repeated soon, not one interval later; one with a refused token is repeated less and less often.
* A heartbeat that fails by a defect reports it; the worker does not continue without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from headrace.common.timeouts import timeout
from headrace.errors import HeadraceError
from headrace.wire import messages
from headrace_workers.worker.backoff import REFUSED_LAST_S, refusal_message
from headrace_workers.worker.connection import OrchestratorConnection
from headrace_workers.worker.logs import logger

FIRST_INTERVAL_S = 5.0
"""Interval until the orchestrator sets another."""

HEARTBEATS_PER_TERM = 3
"""Heartbeats per lease term: two may be lost before a lease expires."""

RETRY_S = 0.5
"""Pause after a heartbeat without an answer."""

SHORTEST_ANSWER_S = 2.0
"""Shortest timeout of a heartbeat. Otherwise it is one interval."""

JOIN_S = 5.0
"""Longest wait for the thread's end in ``stop``."""


class Heartbeat:
    """Sends heartbeats until stopped. All three callbacks run on the heartbeat's thread.

    ``on_defect`` is called once, if the heartbeat ends without having been stopped.
    """

    def __init__(
        self,
        connection: OrchestratorConnection,
        *,
        content: Callable[[], messages.HeartbeatRequest],
        on_reply: Callable[[messages.HeartbeatReply], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._connection = connection
        self._content = content
        self._on_reply = on_reply
        self._on_defect = on_defect
        self._interval_s = FIRST_INTERVAL_S
        self._shortest_term_s = float("inf")
        self._refused_s = RETRY_S
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped = True
        if self._task is not None:
            self._call(self._task.cancel)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, JOIN_S)

    def add_term(self, term_s: float) -> None:
        """Note the lease term of a new attempt. Safe to call from any thread."""
        if term_s < self._shortest_term_s:
            self._shortest_term_s = term_s
            self._call(self._wake.set)

    def _call(self, function: Callable[[], object]) -> None:
        """Schedule a call on the heartbeat's loop, unless the loop has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _work(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except BaseException as error:  # noqa: BLE001 - passed to the worker, which then stops
            if not self._stopped:
                self._on_defect(error)

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            while not self._stopped:
                pause_s = await self._beat()
                with contextlib.suppress(TimeoutError):
                    async with timeout(pause_s):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._connection.close()

    async def _beat(self) -> float:
        """Send one heartbeat and return the pause after it."""
        try:
            timeout_s = max(SHORTEST_ANSWER_S, self._interval_s)
            reply = await self._connection.heartbeat(self._content(), timeout_s=timeout_s)
        except HeadraceError as error:
            if refusal := refusal_message(error):
                return self._refusal_pause_s(refusal, error)
            logger().warning("heartbeat got no answer", error=str(error))
            return min(RETRY_S, self._interval_s)
        self._interval_s, self._refused_s = reply.interval_s, RETRY_S
        self._on_reply(reply)
        return min(self._interval_s, self._shortest_term_s / HEARTBEATS_PER_TERM)

    def _refusal_pause_s(self, refusal: str, error: HeadraceError) -> float:
        """Pause after a refusal: it doubles each time, limited by the terms of the held leases."""
        pause_s = min(self._refused_s, self._shortest_term_s / HEARTBEATS_PER_TERM)
        self._refused_s = min(REFUSED_LAST_S, self._refused_s * 2)
        logger().warning(refusal, error=str(error), pause_s=round(pause_s, 3))
        return pause_s

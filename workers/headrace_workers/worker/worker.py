"""The worker: leases attempts, runs their episodes concurrently, and submits their records.

* Attempts are leased in batches as slots become free; longer episodes allow longer gathering.
* Nothing is leased while the spool is full.
* When stopped, it leases nothing new, finishes attempts within the grace period and returns the rest.
* When stopped again, it returns all attempts at once.
* An outage of the orchestrator does not stop episodes.
* A lease request times out well before leases granted by a lost answer expire.
* Leases and heartbeats name the instance of their process.
* Attempts are renewed only while their event loop runs.
* Without its heartbeat, or with too many hanging environment calls, it ends with an error; its supervisor starts
  another worker.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from headrace.common.timeouts import timeout
from headrace.errors import HeadraceError
from headrace.wire import messages
from headrace_workers.episode import EpisodeTools
from headrace_workers.worker.attempts import HeldAttempts
from headrace_workers.worker.backoff import Backoff
from headrace_workers.worker.connection import ANSWER_S, EpochFence, OrchestratorConnection
from headrace_workers.worker.heartbeat import Heartbeat
from headrace_workers.worker.logs import logger
from headrace_workers.worker.loop_lag import LoopLag
from headrace_workers.worker.run_plans import RunPlans
from headrace_workers.worker.spool import Spool, key_of
from headrace_workers.worker.submitter import Submitter

LEASE_WAIT_S = 20.0
"""Long poll of a lease request: below the idle limits of common proxies."""

GATHER_S, LONGEST_GATHER_S, GATHER_EPISODE_SHARE = 0.002, 0.05, 0.01
"""Time for which free slots are gathered before the next lease request: this share of an episode's usual duration,
between two limits. Episodes of a millisecond end close together, and a request for many costs as much as for one; for
long episodes a hundredth of their duration is negligible."""

MIN_FREE_DIVISOR = 4
"""Slots are not gathered once at least one in this many is free."""

LEASES_PER_FILL = 4
"""Lease requests that fill all slots. While one is granted, the attempts of the previous one run and earlier ones are
submitted; with a single large request, worker and orchestrator would wait for each other in turn."""

LEASES_PER_TERM = 3
"""A lease request waits up to a third of the shortest lease term for work, and as long for its answer. So an attempt
granted in a lost answer is reported missing while a third of its term is left."""

SHORTEST_ANSWER_S = 0.5
"""Shortest timeout for the answer to a lease request; a group commit takes milliseconds."""

STUCK_SHARE = 2 / 3
"""Share of its lease term after which an attempt on a stuck event loop is no longer renewed. A shorter stall loses
nothing; after a longer one another worker should get the episode."""

EMPTY_PAUSE_S = 0.05
"""Pause after an answer without work, which may have come at once."""

SHUTDOWN_S = 5.0
"""Time at the end to return attempts and to submit the records in the spool."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker. ``name`` is unique among all workers; ``spool_bytes`` limits finished records in memory;
    ``sandbox`` names the sandbox in which environments run programs, if any; ``imports`` are modules already imported
    here, which environment processes import too. ``instance`` tells this process from others of the name; by default it
    is a new id.

    ``max_hanging`` limits environment calls that never return. Each keeps a thread and its environment's memory until
    the process ends. A machine bears the default number easily, and a long run with a few bad tasks does not reach it.
    """

    name: str
    orchestrator: str
    token: str = ""
    pool: str = "default"
    capabilities: tuple[str, ...] = ()
    sandbox: str = ""
    imports: tuple[str, ...] = ()
    slots: int = 64
    spool_bytes: int = 256 << 20
    grace_s: float = 30.0
    max_hanging: int = 64
    instance: str = ""


class Worker:
    """The work of one worker process. Call ``run`` once, on the event loop on which it was made."""

    def __init__(self, settings: WorkerSettings, tools: EpisodeTools) -> None:
        self._settings = settings
        self._tools = tools
        self._instance = settings.instance or tools.new_id()
        fence = EpochFence()
        self._connection, heartbeat_connection = (
            OrchestratorConnection(settings.orchestrator, worker=settings.name, token=settings.token, fence=fence)
            for _ in range(2)
        )
        self._spool = Spool(settings.spool_bytes)
        self._attempts = HeldAttempts(tools, RunPlans(self._connection), self._spool, self._attempt_ended)
        self._submitter = Submitter(
            self._connection, self._spool, self._attempts.substitute, self._attempts.submit_gather_s
        )
        self._has_failed = False
        self._shortest_term_s = math.inf
        self._is_stuck = False
        self._slot_freed = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._grace_s: float | None = settings.grace_s
        self._deadline = 0.0
        self._lag = LoopLag(tools.clock)
        self._loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            heartbeat_connection,
            content=self._heartbeat_content,
            on_reply=self._heartbeat_reply,
            on_defect=self._heartbeat_defect,
        )

    def stop(self) -> None:
        """Stop after the grace period; a second call ends that period."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def drain(self) -> None:
        """Stop when all held attempts are finished, however long that takes."""
        if not self._stop.is_set():
            logger().info("the worker drains", running=len(self._attempts.running))
            self._grace_s = None
            self._stop.set()

    async def run(self) -> bool:
        """Work until stopped. Returns True if every record was submitted and the worker had no defect."""
        self._heartbeat.start()
        background: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._lease_forever()),
            asyncio.create_task(self._submitter.submit_forever()),
            asyncio.create_task(self._lag.watch()),
        ]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # any other task than the wait for the stop ends only by a defect, and raises it here
            self._deadline = self._tools.clock() + self._settings.grace_s
            await _cancel_and_wait(background.pop(0))
            await self._finish_running()
            await self._return_remaining()
            return await self._flush() and not self._has_failed
        finally:
            await _cancel_and_wait(stopping, *background)
            await self._heartbeat.stop()
            await self._connection.close()

    # Leasing

    async def _lease_forever(self) -> None:
        backoff = Backoff()
        report_held = True
        while True:
            await self._gather_slots()
            try:
                request = self._lease_request(report_held=report_held)
                reply = await self._connection.lease(request, answer_s=self._answer_s())
            except HeadraceError as error:
                report_held = True
                # Attempts granted in a lost answer expire unless the next request comes within their term.
                await backoff.pause(error, longest_s=self._shortest_term_s / LEASES_PER_TERM)
                continue
            report_held = False
            backoff.reset()
            self._attempts.cancel(reply.cancels)
            for assignment in reply.attempts:
                self._shortest_term_s = min(self._shortest_term_s, assignment.term_s)
                self._heartbeat.add_term(assignment.term_s)
                self._attempts.start(assignment)
            if reply.drain:
                self.drain()
            if not reply.attempts:
                await asyncio.sleep(EMPTY_PAUSE_S)

    def _lease_request(self, *, report_held: bool) -> messages.LeaseRequest:
        settings = self._settings
        return messages.LeaseRequest(
            worker=settings.name,
            pool=settings.pool,
            capabilities=[*settings.capabilities, *self._tools.sandbox.capabilities],
            slots=settings.slots,
            free=min(self._free(), max(1, self._settings.slots // LEASES_PER_FILL)),
            holding=self._attempts.keys() if report_held else None,
            wait_s=min(LEASE_WAIT_S, self._shortest_term_s / LEASES_PER_TERM),
            instance=self._instance,
        )

    def _answer_s(self) -> float:
        return min(ANSWER_S, max(SHORTEST_ANSWER_S, self._shortest_term_s / LEASES_PER_TERM))

    def _free(self) -> int:
        return max(0, self._settings.slots - len(self._attempts.running))

    async def _gather_slots(self) -> None:
        while self._spool.is_full or not self._free():
            if self._spool.is_full:
                await asyncio.sleep(EMPTY_PAUSE_S)
            else:
                self._slot_freed.clear()
                await self._slot_freed.wait()
        if self._attempts.running and self._free() * MIN_FREE_DIVISOR < self._settings.slots:
            await asyncio.sleep(
                max(GATHER_S, self._attempts.episode_duration.share_s(GATHER_EPISODE_SHARE, LONGEST_GATHER_S))
            )

    def _attempt_ended(self) -> None:
        self._slot_freed.set()
        self._check_hanging()

    def _check_hanging(self) -> None:
        hanging = self._tools.threads.hanging
        if hanging >= self._settings.max_hanging and not self._stop.is_set():
            logger().error(
                "too many environment calls hang, and only the end of the process frees them; start another worker",
                hanging=hanging,
            )
            self._has_failed = True
            self.drain()

    # Heartbeat

    def _keys_to_renew(self) -> list[messages.AttemptKey]:
        """Keys of the attempts to renew: all held ones, except those whose event loop has been stuck too long."""
        current_lag_s = self._lag.current_lag_s()
        held = self._attempts.assignments()
        renewed = [key_of(attempt) for attempt in held if current_lag_s <= attempt.term_s * STUCK_SHARE]
        is_stuck = len(renewed) < len(held)
        if is_stuck and not self._is_stuck:
            logger().error(
                "the event loop is stuck, so its attempts are not renewed; check for an environment with "
                "blocking = False that blocks",
                current_lag_s=round(current_lag_s, 3),
                attempts=len(held) - len(renewed),
            )
        self._is_stuck = is_stuck
        return renewed

    def _heartbeat_content(self) -> messages.HeartbeatRequest:
        return messages.HeartbeatRequest(
            instance=self._instance,
            worker=self._settings.name,
            pool=self._settings.pool,
            slots=self._settings.slots,
            holding=self._keys_to_renew(),
            stats={
                "event_loop_lag_s": self._lag.take_worst_s(),
                "spool_bytes": float(self._spool.size_bytes),
                "policy_waiting": float(self._tools.sampling_now),
                "environment_waiting": float(self._tools.threads.running),
                "environment_abandoned": float(self._tools.threads.abandoned),
                "environment_hanging": float(self._tools.threads.hanging),
                "control_tokens": float(self._tools.control_tokens),
                **self._tools.policies.stats(),
            },
        )

    def _heartbeat_reply(self, reply: messages.HeartbeatReply) -> None:
        """Handle a reply, on the heartbeat's thread."""
        if reply.cancels:
            self._loop.call_soon_threadsafe(self._attempts.cancel, reply.cancels)
        if reply.drain:
            self._loop.call_soon_threadsafe(self.drain)

    def _heartbeat_defect(self, error: BaseException) -> None:
        """Handle a failed heartbeat, at the end of its thread."""
        logger().error("the heartbeat failed, so no lease can be renewed; the worker ends", exc_info=error)
        self._loop.call_soon_threadsafe(self._stop_after_defect)

    def _stop_after_defect(self) -> None:
        """Stop leasing, return running attempts, and end with an error."""
        self._has_failed = True
        self._stop.set()
        self._stop_now.set()

    # The end

    async def _finish_running(self) -> None:
        """Wait for running attempts, until the grace period ends or ``stop`` is called again."""
        if not self._attempts.running:
            return
        tasks = [running.task for running in self._attempts.running.values() if running.task is not None]
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._stop_now.wait()),
            asyncio.create_task(asyncio.wait(tasks)),
        ]
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        await _cancel_and_wait(*waits)

    async def _return_remaining(self) -> None:
        """Cancel the remaining attempts and return them. Without an answer, their leases expire."""
        remaining = [running for running in self._attempts.running.values() if not running.recorded]
        for running in remaining:
            running.cancel("The worker stops.", wanted=False)
        keys = [key_of(running.assignment) for running in remaining]
        if not keys:
            return
        try:
            async with timeout(SHUTDOWN_S):
                await self._connection.return_attempts(keys)
            logger().info("returned attempts", attempts=len(keys))
        except (HeadraceError, TimeoutError) as error:
            logger().error("could not return attempts; their leases will expire", attempts=len(keys), error=str(error))

    async def _flush(self) -> bool:
        left_s = 0.0 if self._stop_now.is_set() else self._deadline - self._tools.clock()
        try:
            async with timeout(max(SHUTDOWN_S, left_s)):
                await self._spool.emptied.wait()
        except TimeoutError:
            logger().error("records are lost: they were not submitted in time", records=len(self._spool))
            return False
        return True


async def _cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

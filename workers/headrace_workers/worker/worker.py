"""The worker: leases attempts, runs their episodes concurrently, and submits their records.

* Attempts are leased in batches as slots become free, and submitted in batches; longer episodes allow longer
  gathering, except for the last attempt.
* Nothing is leased while the spool is full.
* Every attempt ends in one record, unless the orchestrator discards it or the worker returns it.
* An attempt that is granted twice (its first reply was lost) is run once.
* When stopped, it leases nothing new, finishes attempts within the grace period and returns the rest.
* When stopped again, it returns all attempts at once.
* An outage of the orchestrator does not stop episodes.
* A lease request times out well before leases granted by a lost answer expire.
* Attempts are renewed only while their event loop runs.
* Without its heartbeat, or with too many hanging environment calls, it ends with an error; its supervisor starts
  another worker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.assets import AssetData
from headrace.common.timeouts import timeout
from headrace.errors import EpisodeFailure, HeadraceError, InfrastructureFailure, InvalidTrajectory
from headrace.trajectory import Failure, Trajectory
from headrace.wire import codec, messages
from headrace_workers.episode import AttemptOutcome, EpisodeRun, EpisodeTools, failed, record_of
from headrace_workers.worker.backoff import Backoff
from headrace_workers.worker.connection import ANSWER_S, EpochFence, OrchestratorConnection
from headrace_workers.worker.episode_duration import EpisodeDuration
from headrace_workers.worker.heartbeat import Heartbeat
from headrace_workers.worker.logs import logger
from headrace_workers.worker.loop_lag import LoopLag
from headrace_workers.worker.run_plans import RunPlans
from headrace_workers.worker.spool import AttemptName, Spool, SpoolEntry, key_of
from headrace_workers.worker.submitter import Submitter

LEASE_WAIT_S = 20.0
"""Long poll of a lease request: below the idle limits of common proxies."""

GATHER_S, LONGEST_GATHER_S, GATHER_EPISODE_SHARE = 0.002, 0.05, 0.01
"""Time for which free slots are gathered before the next lease request: this share of an episode's usual duration,
between two limits. Episodes of a millisecond end close together, and a request for many costs as much as for one; for
long episodes a hundredth of their duration is negligible."""

SUBMIT_EPISODE_SHARE, LONGEST_SUBMIT_S = 0.04, 0.1
"""Time for which finished episodes are gathered while others run: this share of an episode's usual duration, up to a
limit."""

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
    here, which environment processes import too.

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


class RunningAttempt:
    """An attempt in a slot. ``wanted`` is False once its record is not needed any more."""

    __slots__ = ("assignment", "cancel_reason", "episode", "recorded", "started_at", "task", "wanted")

    def __init__(self, assignment: messages.Assignment, started_at: float) -> None:
        self.assignment = assignment
        self.started_at = started_at
        self.task: asyncio.Task[None] | None = None
        self.episode: EpisodeRun | None = None
        self.cancel_reason = ""
        self.wanted = True
        self.recorded = False

    def cancel(self, reason: str, *, wanted: bool) -> None:
        """Cancel the attempt. ``wanted``: whether to make a ``cancelled`` record."""
        if self.recorded or self.task is None:
            return
        self.wanted = self.wanted and wanted
        if not self.cancel_reason:
            self.cancel_reason = reason
            if self.episode is not None:
                self.episode.cancel_reason = reason
            self.task.cancel()


class _Connections(NamedTuple):
    work: OrchestratorConnection
    heartbeat: OrchestratorConnection


class Worker:
    """The work of one worker process. Call ``run`` once, on the event loop on which it was made."""

    def __init__(self, settings: WorkerSettings, tools: EpisodeTools, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._tools = tools
        self._clock = clock
        fence = EpochFence()
        self._connections = _Connections(
            *(
                OrchestratorConnection(settings.orchestrator, worker=settings.name, token=settings.token, fence=fence)
                for _ in range(2)
            )
        )
        self._plans = RunPlans(self._connections.work)
        self._spool = Spool(settings.spool_bytes)
        self._submitter = Submitter(self._connections.work, self._spool, self._substitute, self._submit_gather_s)
        self._episode_duration = EpisodeDuration()
        self._has_failed = False
        self._shortest_term_s = math.inf
        self._is_stuck = False
        self._running: dict[AttemptName, RunningAttempt] = {}
        self._slot_freed = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._grace_s: float | None = settings.grace_s
        self._deadline = 0.0
        self._lag = LoopLag(clock)
        self._loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            self._connections.heartbeat,
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
            logger().info("the worker drains", running=len(self._running))
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
                task.result()  # only the wait for the stop may end by itself; another end is a defect, and raises here
            self._deadline = self._clock() + self._settings.grace_s
            await _cancel_and_wait(background.pop(0))
            await self._finish_running()
            await self._hand_back()
            return await self._flush() and not self._has_failed
        finally:
            await _cancel_and_wait(stopping, *background)
            await self._heartbeat.stop()
            await self._connections.work.close()

    # Leasing

    async def _lease_forever(self) -> None:
        backoff = Backoff()
        tell_holding = True
        while True:
            await self._gather_slots()
            try:
                request = self._lease_request(tell_holding=tell_holding)
                reply = await self._connections.work.lease(request, answer_s=self._answer_s())
            except HeadraceError as error:
                tell_holding = True
                # Attempts granted in a lost answer expire unless the next request comes within their term.
                await backoff.pause(error, longest_s=self._shortest_term_s / LEASES_PER_TERM)
                continue
            tell_holding = False
            backoff.reset()
            self._cancel_all(reply.cancels)
            for assignment in reply.attempts:
                self._start(assignment)
            if reply.drain:
                self.drain()
            if not reply.attempts:
                await asyncio.sleep(EMPTY_PAUSE_S)

    def _lease_request(self, *, tell_holding: bool) -> messages.LeaseRequest:
        settings = self._settings
        return messages.LeaseRequest(
            worker=settings.name,
            pool=settings.pool,
            capabilities=[*settings.capabilities, *self._tools.sandbox.capabilities],
            slots=settings.slots,
            free=min(self._free(), max(1, self._settings.slots // LEASES_PER_FILL)),
            holding=self._held_keys() if tell_holding else None,
            wait_s=min(LEASE_WAIT_S, self._shortest_term_s / LEASES_PER_TERM),
        )

    def _answer_s(self) -> float:
        return min(ANSWER_S, max(SHORTEST_ANSWER_S, self._shortest_term_s / LEASES_PER_TERM))

    def _free(self) -> int:
        return max(0, self._settings.slots - len(self._running))

    async def _gather_slots(self) -> None:
        while self._spool.is_full or not self._free():
            if self._spool.is_full:
                await asyncio.sleep(EMPTY_PAUSE_S)
            else:
                self._slot_freed.clear()
                await self._slot_freed.wait()
        if self._running and self._free() * MIN_FREE_DIVISOR < self._settings.slots:
            await asyncio.sleep(max(GATHER_S, self._episode_duration.share_s(GATHER_EPISODE_SHARE, LONGEST_GATHER_S)))

    def _start(self, assignment: messages.Assignment) -> None:
        name = (assignment.episode, assignment.attempt)
        if name in self._running or name in self._spool:
            return
        self._shortest_term_s = min(self._shortest_term_s, assignment.term_s)
        self._heartbeat.add_term(assignment.term_s)
        running = self._running[name] = RunningAttempt(assignment, self._clock())
        running.task = self._loop.create_task(self._attempt(running))
        running.task.add_done_callback(lambda task: self._end_attempt(name, running, task))

    # One attempt

    async def _attempt(self, running: RunningAttempt) -> None:
        assignment = running.assignment
        try:
            plan = self._plans.get(assignment.run) or await self._plans.fetch(assignment.run)
        except EpisodeFailure as error:
            self._finish(running, self._bare_record(assignment, failed(error)))
            return
        episode = running.episode = EpisodeRun(self._tools, assignment, plan)
        self._finish(running, await episode.run(), episode.assets)
        try:
            await episode.close()
        except EpisodeFailure as error:
            logger(assignment).warning("the environment did not close", error=str(error))
        running.episode = None  # free the memory now, not in the task's callback: other episodes need it

    def _end_attempt(self, name: AttemptName, running: RunningAttempt, task: asyncio.Task[None]) -> None:
        """Free the slot. An attempt that ended without a record gets one here."""
        del self._running[name]
        self._episode_duration.add(self._clock() - running.started_at)
        self._slot_freed.set()
        self._check_hanging()
        if task.cancelled():
            failure = Failure(layer="infrastructure", kind="cancelled", message=running.cancel_reason)
            outcome = AttemptOutcome(status="cancelled", stop_reason="cancelled", failure=failure)
        elif (error := task.exception()) is not None:
            logger(running.assignment).error("the worker failed", exc_info=error)
            outcome = failed(
                InfrastructureFailure(f"The worker failed: {error!r}", kind="worker-fault", retryable=True)
            )
        else:
            return
        if not running.recorded:
            self._finish(running, self._bare_record(running.assignment, outcome))

    def _finish(
        self, running: RunningAttempt, trajectory: Trajectory, assets: Mapping[str, AssetData] = MappingProxyType({})
    ) -> None:
        running.recorded = True
        if not running.wanted:
            return
        if trajectory.failure is not None:
            failure = trajectory.failure
            logger(running.assignment).warning(
                f"episode {trajectory.status}", layer=failure.layer, kind=failure.kind, message=failure.message
            )
        try:
            record = codec.encode(trajectory)
        except InvalidTrajectory as error:
            self._spool.add(self._substitute(SpoolEntry(running.assignment, b""), error))
            return
        record_assets = {asset.name: assets[asset.name] for asset in trajectory.assets}
        self._spool.add(SpoolEntry(running.assignment, record, record_assets))

    def _submit_gather_s(self) -> float:
        """Time that finished attempts may wait for others to be submitted with them; zero for the last one."""
        others = any(not running.recorded for running in self._running.values())
        return self._episode_duration.share_s(SUBMIT_EPISODE_SHARE, LONGEST_SUBMIT_S) if others else 0.0

    def _substitute(self, entry: SpoolEntry, error: HeadraceError) -> SpoolEntry:
        failure = InfrastructureFailure(
            f"The record of this attempt was refused: {error}", kind="record-refused", retryable=False
        )
        trajectory = self._bare_record(entry.assignment, failed(failure))
        return SpoolEntry(entry.assignment, codec.encode(trajectory), is_substitute=True)

    def _bare_record(self, assignment: messages.Assignment, outcome: AttemptOutcome) -> Trajectory:
        return record_of(assignment, outcome, trajectory_id=self._tools.new_id(), worker=self._settings.name)

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

    def _held_assignments(self) -> list[messages.Assignment]:
        held = {name: running.assignment for name, running in list(self._running.items())}
        held |= {entry.name: entry.assignment for entry in self._spool.entries()}
        return list(held.values())

    def _held_keys(self) -> list[messages.AttemptKey]:
        return [key_of(attempt) for attempt in self._held_assignments()]

    def _keys_to_renew(self) -> list[messages.AttemptKey]:
        """Keys of the attempts to renew: all held ones, except those whose event loop has been stuck too long."""
        stuck_s = self._lag.stuck_s()
        held = self._held_assignments()
        renewed = [key_of(attempt) for attempt in held if stuck_s <= attempt.term_s * STUCK_SHARE]
        is_stuck = len(renewed) < len(held)
        if is_stuck and not self._is_stuck:
            logger().error(
                "the event loop is stuck, so its attempts are not renewed; check for an environment with "
                "blocking = False that blocks",
                stuck_s=round(stuck_s, 3),
                attempts=len(held) - len(renewed),
            )
        self._is_stuck = is_stuck
        return renewed

    def _heartbeat_content(self) -> messages.HeartbeatRequest:
        return messages.HeartbeatRequest(
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
                **self._tools.policies.stats(),
            },
        )

    def _heartbeat_reply(self, reply: messages.HeartbeatReply) -> None:
        """Handle a reply, on the heartbeat's thread."""
        if reply.cancels:
            self._loop.call_soon_threadsafe(self._cancel_all, reply.cancels)
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

    def _cancel_all(self, cancels: list[messages.Cancel]) -> None:
        for cancel in cancels:
            running = self._running.get((cancel.episode, cancel.attempt))
            if running is not None:
                running.cancel(cancel.reason, wanted=cancel.record)

    # The end

    async def _finish_running(self) -> None:
        """Wait for running attempts, until the grace period ends or ``stop`` is called again."""
        if not self._running:
            return
        tasks = [running.task for running in self._running.values() if running.task is not None]
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._stop_now.wait()),
            asyncio.create_task(asyncio.wait(tasks)),
        ]
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        await _cancel_and_wait(*waits)

    async def _hand_back(self) -> None:
        """Cancel the remaining attempts and return them. Without an answer, their leases expire."""
        rest = [running for running in self._running.values() if not running.recorded]
        for running in rest:
            running.cancel("The worker stops.", wanted=False)
        keys = [key_of(running.assignment) for running in rest]
        if not keys:
            return
        try:
            async with timeout(SHUTDOWN_S):
                await self._connections.work.hand_back(keys)
            logger().info("returned attempts", attempts=len(keys))
        except (HeadraceError, TimeoutError) as error:
            logger().error("could not return attempts; their leases will expire", attempts=len(keys), error=str(error))

    async def _flush(self) -> bool:
        left_s = 0.0 if self._stop_now.is_set() else self._deadline - self._clock()
        try:
            async with timeout(max(SHUTDOWN_S, left_s)):
                await self._spool.emptied.wait()
        except TimeoutError:
            logger().error("records are lost: the orchestrator did not take them", records=len(self._spool))
            return False
        return True


async def _cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""How a service starts, becomes ready, and ends.

* Until the log is read, everything is answered ``unavailable``, with the phase and how far it is.
* A store that fails makes the service not ready; it says which error it was.
* When it drains, long polls are answered at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace.assets import FOLDER
from headrace.errors import StoreError, Unavailable
from headrace.ids import new_id, random_pool
from headrace_orchestrator import logs
from headrace_orchestrator.buffer.assets import COLLECT_EVERY_S, Assets
from headrace_orchestrator.buffer.directory import DataDirectory
from headrace_orchestrator.buffer.log import Log
from headrace_orchestrator.buffer.projection import Projection
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service.pulling import Pulls
from headrace_orchestrator.service.replay import replay
from headrace_orchestrator.service.serving import Bodies
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.store import Store
from headrace_orchestrator.settings import Settings

log = logs.logger(__name__)

PROJECT_EVERY_S = 0.2
"""How often rows go to the projection: rarely enough to be off the hot path, often enough for a person."""

RECENT_SYNCS = 512
"""Group commits that the median sync time looks back on."""


class Phase(msgspec.Struct, frozen=True):
    """What the service is busy with. ``done`` of ``total`` bytes, while it starts."""

    name: str
    done: int = 0
    total: int = 0


class Running(NamedTuple):
    """What exists once the log is read."""

    shell: Shell
    pulls: Pulls
    assets: Assets


class Lifecycle:
    """``start``, then commands, then ``drain`` and ``close``."""

    def __init__(
        self, settings: Settings, directory: DataDirectory, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.epoch = directory.epoch
        self.metrics = metrics
        self._settings = settings
        self._directory = directory
        self._clock = clock
        self._started_at = clock()
        self._replayed_s = 0.0
        self._phase = "starting"
        self._failure = ""
        self._log: Log | None = None
        self._running: Running | None = None
        self._syncs: deque[float] = deque(maxlen=RECENT_SYNCS)
        self._tasks: list[asyncio.Task[None]] = []

    # Life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the log and become ready. Requests may come meanwhile. Raises StoreError."""
        self._phase = "reading the log"
        self._log = Log(self._directory.path / "log", file_bytes=self._settings.log_file_bytes, on_sync=self._synced)
        store = Store(self._log, Projection(self._directory.path / "projection.sqlite", self._log.id))
        assets = Assets(
            self._directory.path / FOLDER, store.referred, clock=self._clock, promise_s=self._settings.asset_promise_s
        )
        core = Scheduler(epoch=self.epoch, new_id=new_id, new_nonce=lambda: random_pool(8).hex())
        # The core's clock stands still while the log is read, so that every lease in it has its full term after.
        begun = self._clock()
        try:
            await asyncio.to_thread(assets.open)
            await asyncio.to_thread(
                replay, core, store, begun, damaged=self.metrics.damaged.inc, stopping=lambda: self.draining
            )
        except BaseException:
            await store.abandon()
            raise
        if self.draining:
            await store.abandon()
            return
        self._replayed_s = self._clock() - begun
        shell = Shell(core, store, self.metrics, lambda: self._clock() - self._replayed_s)
        self._running = Running(shell, Pulls(shell, Bodies(store), self.metrics, self.epoch), assets)
        self._tasks = [asyncio.create_task(task()) for task in (self._project, self._watch_lag, self._collect)]
        shell.commit()
        await store.log.synced()
        self._phase = "ready"
        self.metrics.ready.set(1)
        log.info("ready", epoch=self.epoch, trajectories=store.trajectories, replayed_s=round(self._replayed_s, 3))

    def drain(self) -> None:
        """Take nothing new, and answer all long polls."""
        self._phase = "draining"
        self.metrics.ready.set(0)
        if self._running is not None:
            self._running.shell.draining = True
            self._running.shell.bells.ring_all()

    @property
    def draining(self) -> bool:
        return self._phase == "draining"

    async def close(self) -> None:
        """Bring everything to disk and close it. Raises StoreError if that fails now; what failed before was told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._running is not None:
            self._running.shell.stop_timer()
            await self._running.assets.close()
            await self._running.shell.store.close()

    async def _project(self) -> None:
        store = self._require().shell.store
        while True:
            await asyncio.sleep(PROJECT_EVERY_S)
            try:
                await store.project()
            except StoreError as error:
                self._failed(error.detail)
                return

    async def files_gone(self, numbers: Sequence[int]) -> None:
        """These files of the log were deleted, durably: what only they referred to goes as well. None of them may be in
        use (``Store.files_in_use``). Raises StoreError."""
        running = self._require()
        running.assets.doubt(await running.shell.store.files_gone(numbers))

    async def _collect(self) -> None:
        """Delete assets that nobody needs. What was there at the start may be promised to somebody since before it."""
        running = self._require()
        every_s = min(COLLECT_EVERY_S, running.assets.promise_s)
        try:
            await self._forget_deleted_files(running.shell.store)
            await asyncio.sleep(running.assets.promise_s)
            await running.assets.doubt_all()
            while True:
                await running.assets.collect()
                await asyncio.sleep(every_s)
        except StoreError as error:
            self._failed(error.detail)

    async def _forget_deleted_files(self, store: Store) -> None:
        """A crash may have come between the deletion of a file and what follows from it."""
        referring = await asyncio.to_thread(store.projection.files_with_assets)
        there = await asyncio.to_thread(store.log.files)
        await store.files_gone([number for number in referring if number not in there])

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROJECT_EVERY_S
            await asyncio.sleep(PROJECT_EVERY_S)
            self.metrics.lag.observe(max(0.0, loop.time() - due))

    def _synced(self, duration_s: float, size_bytes: int) -> None:
        self._syncs.append(duration_s)
        self.metrics.sync.observe(duration_s)
        self.metrics.log_written.inc(size_bytes)

    def _failed(self, problem: str) -> None:
        if not self._failure:
            log.error("the store failed; not ready until a restart", problem=problem)
        self._failure = problem
        self.metrics.ready.set(0)

    # Readiness ------------------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        """What it is busy with."""
        if self._log is not None and self._running is None:
            return Phase(self._phase, self._log.scanned_bytes, self._log.found_bytes)
        return Phase(self._phase)

    def require_ready(self) -> None:
        """Raises Unavailable unless everything works, with ``phase``, ``done`` and ``total``."""
        self._require()
        if self._phase != "ready":
            raise self._busy()

    def require_started(self) -> None:
        """Raises Unavailable until the log is read: before that there are no answers, not empty ones."""
        if self._running is None:
            raise self._busy()

    def _busy(self) -> Unavailable:
        phase = self.phase()
        share = f", {phase.done / phase.total:.0%}" if phase.total else ""
        return Unavailable(
            f"The orchestrator is not ready: {phase.name}{share}.",
            hint="Try again.",
            phase=phase.name,
            done=phase.done,
            total=phase.total,
        )

    def _require(self) -> Running:
        if self._running is None:
            raise self._busy()
        if self._running.shell.store.log.failure:
            self._failed(self._running.shell.store.log.failure)
        if self._failure:
            raise Unavailable(
                f"The store failed: {self._failure}.",
                hint="Mend what failed, then restart the orchestrator.",
                phase="failed",
            )
        return self._running

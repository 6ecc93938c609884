"""How a service starts, becomes ready, and ends.

* Until the log is read, everything is answered ``unavailable``, with the phase, how far it is and how long it may take.
* A store that fails makes the service not ready; it says which error it was, and is ready again once the disk takes
  what waits. Whoever watches it, by the console or by metrics, sees meanwhile what is in memory, and that it failed.
* When it drains, long polls are answered at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headrace.common.ids import new_id, random_pool
from headrace.errors import HeadraceError, StoreError, Unavailable
from headrace.server import logs
from headrace.store.asset_files import FOLDER
from headrace_orchestrator.buffer.assets.store import COLLECT_EVERY_S, AssetStore
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.log.writer import LogWriter
from headrace_orchestrator.buffer.log.writer_thread import LogWriterThread
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.service.batches import BatchBodies
from headrace_orchestrator.service.policy_servers import PolicyServers
from headrace_orchestrator.service.pulls import Pulls
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.storage.page_cache import PageCacheTrimmer
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.retention import RetentionLoop
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.submissions import Submissions
from headrace_orchestrator.settings import Settings

log = logs.logger(__name__)

PROJECT_EVERY_S = 0.2
"""How often rows go to the projection: rarely enough to be off the hot path, often enough for a person."""

RECENT_SYNCS = 512
"""Group commits that the median sync time looks back on."""


class ServicePhase(msgspec.Struct, frozen=True):
    """What the service is busy with. ``done`` of ``total`` bytes, while it starts, and the seconds that the rest may
    take by the pace so far. ``failure``: why nothing can be stored now, ``remedy``: what to do about it; empty when all
    is well."""

    name: str
    done: int = 0
    total: int = 0
    estimate_s: float | None = None
    failure: str = ""
    remedy: str = ""


StartLogWriter = Callable[[DataDirectory], LogWriter]
"""Gives what writes the log of a data directory."""


def start_log_writer_thread(directory: DataDirectory) -> LogWriter:
    """The writer in a thread of this process: for a service among other things."""
    return LogWriterThread(directory.path / "log", directory.require_owned)


class RunningService(NamedTuple):
    """What exists once the log is read."""

    shell: Shell
    pulls: Pulls
    assets: AssetStore
    submissions: Submissions
    plane: PolicyServers


class Lifecycle:
    """``start``, then commands, then ``drain`` and ``close``."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        metrics: Metrics,
        clock: Callable[[], float],
        start_log_writer: StartLogWriter,
    ) -> None:
        self.epoch = directory.epoch
        self.metrics = metrics
        self._settings = settings
        self._directory = directory
        self._clock = clock
        self._start_log_writer = start_log_writer
        self._started_at = self._reading_since = clock()
        self._replayed_s = 0.0
        self._phase = "starting"
        self._projection_failure = self._projection_phase = ""
        self._log: Log | None = None
        self._running: RunningService | None = None
        self._syncs: deque[float] = deque(maxlen=RECENT_SYNCS)
        self._tasks: list[asyncio.Task[None]] = []

    # Life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the log and become ready. Requests may come meanwhile. Raises StoreError."""
        self._phase = "opening the log"
        begun = self._reading_since = self._clock()
        writing = self._start_log_writer(self._directory)
        try:
            # Heads of files may be large: the event loop answers meanwhile.
            self._log = await asyncio.to_thread(self._open_log, writing)
        except BaseException:
            await writing.close()
            raise
        if not self.draining:
            self._phase = "reading the log"
        store = Store(self._log, SqliteProjection(self._directory.path / "projection.sqlite", self._log.id))
        assets = AssetStore(
            self._directory.path / FOLDER, store.referenced, clock=self._clock, promise_s=self._settings.asset_promise_s
        )
        bounds = SharedBounds(self._settings.max_held_bytes or math.inf, self._settings.max_disk_bytes or math.inf)
        core = Scheduler(epoch=self.epoch, new_id=new_id, new_nonce=lambda: random_pool(8).hex(), bounds=bounds)
        # The core's clock stands still while the log is read, so that every lease in it has its full term after.
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
        writing.watch()
        self._replayed_s = self._clock() - begun
        shell = Shell(core, store, self.metrics, lambda: self._clock() - self._replayed_s)
        submissions = Submissions(shell, assets, self.metrics, self.epoch)
        pulls = Pulls(shell, BatchBodies(store), self.metrics, self.epoch)
        self._running = RunningService(
            shell, pulls, assets, submissions, PolicyServers(shell, self.metrics, self.epoch)
        )
        retainer = RetentionLoop(
            store,
            assets,
            self._settings.retention,
            bounds,
            rotate=lambda: store.rotate(core),
            on_deleted=self._deleted,
            now_s=lambda: time.time_ns() / 1e9,
        )
        tasks = (self._project, self._watch_lag, self._collect, retainer.run, PageCacheTrimmer(store).run)
        self._tasks = [asyncio.create_task(task()) for task in tasks]
        shell.commit()
        await store.log.synced()
        self._phase = "ready"
        self.metrics.ready.set(1)
        trajectories, replayed_s = store.index.trajectories, round(self._replayed_s, 3)
        log.info("ready", epoch=self.epoch, trajectories=trajectories, replayed_s=replayed_s)

    def _open_log(self, writing: LogWriter) -> Log:
        settings = self._settings
        return Log(
            self._directory.path / "log",
            file_bytes=settings.retention.file_bytes(settings.log_file_bytes, settings.max_disk_bytes),
            epoch=self.epoch,
            require_owned=self._directory.require_owned,
            on_sync=self._synced,
            on_failure=self._disk_refuses,
            on_recovery=self._disk_takes,
            writer=writing,
        )

    def drain(self) -> None:
        """Take nothing new, and answer all long polls."""
        self._phase = "draining"
        self.metrics.ready.set(0)
        if self._running is not None:
            self._running.shell.draining = True
            self._running.shell.queues.wake_all()

    @property
    def draining(self) -> bool:
        return self._phase == "draining"

    async def close(self) -> None:
        """Bring everything to disk and close it. Raises StoreError if that fails now; what failed before was told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._running is not None:
            await self._running.submissions.close()
            await self._running.plane.close()
            self._running.shell.stop_timer()
            await self._running.assets.close()
            await self._running.shell.store.close()

    async def _project(self) -> None:
        store = self.require_stored().shell.store
        while True:
            await asyncio.sleep(PROJECT_EVERY_S)
            try:
                await store.project()
            except StoreError as error:
                if not store.log.failure and not self._projection_failure:
                    log.error("the projection failed; not ready until it is written", problem=error.detail)
                    self._projection_failure = error.detail
                    self._projection_phase = str(error.extra.get("phase", "failed"))
            else:
                self._projection_failure = ""
            self._show_ready()

    async def _collect(self) -> None:
        """See that assets which nobody needs go; again from the beginning where something was in the way."""
        while True:
            try:
                await self._collect_assets()
            except (HeadraceError, OSError) as error:
                problem = error.detail if isinstance(error, HeadraceError) else str(error)
                log.error("assets could not be collected; tried again", problem=problem)
                await asyncio.sleep(COLLECT_EVERY_S)

    async def _collect_assets(self) -> None:
        """Delete assets that nobody needs. What was there at the start may be promised to somebody since before it."""
        running = self.require_stored()
        await running.assets.measure()
        await self._forget_deleted_files(running.shell.store)
        await asyncio.sleep(running.assets.promise_s)
        # A reference that was lost with a flipped byte must not cost an asset.
        await asyncio.to_thread(running.shell.store.projection.check)
        await running.assets.collect_all()
        while True:
            await running.assets.collect()
            await asyncio.sleep(min(COLLECT_EVERY_S, running.assets.promise_s))

    async def _forget_deleted_files(self, store: Store) -> None:
        """A crash may have come between the deletion of a file and what follows from it."""
        listed = await asyncio.to_thread(store.projection.files)
        there = await asyncio.to_thread(store.log.files.sizes)
        await store.forget_files([number for number in listed if number not in there])

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

    def _deleted(self, size_bytes: int) -> None:
        self.metrics.log_files_deleted.inc()
        self.metrics.log_deleted.inc(size_bytes)

    def _disk_refuses(self) -> None:
        """Time stands still and everybody is told, until the disk takes what waits."""
        if self._log is not None:
            hint = "restart the orchestrator" if self._log.stopped else "tried again until it does"
            log.error("the disk refuses", problem=self._log.failure, what_next=hint)
        self._show_ready()
        if self._running is not None:
            self._running.shell.stop_timer()
            self._running.shell.queues.wake_all()

    def _disk_takes(self) -> None:
        log.info("the disk takes data again")
        self._show_ready()
        if self._running is not None:
            shell = self._running.shell
            shell.store.rotate_if_due(shell.core)
            shell.set_timer()

    def _show_ready(self) -> None:
        self.metrics.ready.set(1 if self._phase == "ready" and not self._failure else 0)
        self.metrics.disk_refuses.set(1 if self._failure else 0)

    @property
    def _failure(self) -> str:
        """Why nothing can be stored now; empty when all is well."""
        return (self._log.failure if self._log is not None else "") or self._projection_failure

    # Readiness ------------------------------------------------------------------------------------------------

    def phase(self) -> ServicePhase:
        """What it is busy with."""
        if self._log is not None and self._running is None:
            done, total = self._log.scanned_bytes, self._log.found_bytes
            passed_s = self._clock() - self._reading_since
            return ServicePhase(self._phase, done, total, passed_s / done * (total - done) if done else None)
        return ServicePhase(self._phase, failure=self._failure, remedy=self._remedy if self._failure else "")

    def require_ready(self) -> None:
        """Raises Unavailable unless everything works, with ``phase``, ``done`` and ``total``."""
        self.require_stored()
        if self._phase != "ready":
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
            estimate_s=None if phase.estimate_s is None else round(phase.estimate_s, 1),
        )

    def require_stored(self) -> RunningService:
        """The parts of the running service. Raises Unavailable until the log is read, and while the store fails."""
        if self._running is None:
            raise self._busy()
        if self._failure:
            phase = self._running.shell.store.log.phase or self._projection_phase
            hint = f"{self._remedy} Then try again."
            raise Unavailable(f"The store failed: {self._failure}.", hint=hint, phase=phase)
        return self._running

    @property
    def _remedy(self) -> str:
        if self._log is not None and self._log.stopped:
            return "Mend what failed, and restart the orchestrator."
        return "Mend what failed: the orchestrator goes on by itself."

"""The life of a service: start, readiness, drain, close.

* Until the log is read, every request is answered ``unavailable``, with the phase, its progress and an estimate.
* A failing store makes the service not ready; the error is reported, and the service is ready again once the disk has
  stored the waiting frames. Console and metrics show the state in memory meanwhile, and the failure.
* A failure that only a start can mend, such as the loss of the log's writer, ends the service: clients are told the
  reason, and the process ends with an error, so that its supervisor starts it anew.
* A background task that fails unexpectedly ends the service in the same way.
* A draining service answers all long polls at once.
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
from headrace.errors import StoreError, Unavailable
from headrace.server import logs
from headrace.store.asset_files import FOLDER
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.log.writer import LogWriter
from headrace_orchestrator.buffer.log.writer_thread import LogWriterThread
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.service.batches.bodies import BatchBodies
from headrace_orchestrator.service.policy_servers.watches import PolicyServers
from headrace_orchestrator.service.pulls import Pulls
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.storage.asset_collection import AssetCollection
from headrace_orchestrator.service.storage.page_cache import PageCacheTrimmer
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.retention import RetentionLoop
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.submissions import Submissions
from headrace_orchestrator.settings import Settings

log = logs.logger(__name__)

PROJECT_EVERY_S = 0.2
"""Seconds between two writes to the projection: long enough to stay off the hot path, short enough for a person."""

RECENT_SYNCS = 512
"""Group commits that the median sync time covers."""


class ServicePhase(msgspec.Struct, frozen=True):
    """The phase of the service. While it starts: ``done`` of ``total`` bytes are read, and the rest may take
    ``estimate_s`` at the pace so far. ``failure``: the reason why nothing can be stored now, ``remedy``: advice; both
    empty when all is well."""

    name: str
    done: int = 0
    total: int = 0
    estimate_s: float | None = None
    failure: str = ""
    remedy: str = ""


StartLogWriter = Callable[[DataDirectory], LogWriter]
"""Starts the log writer of a data directory."""


def start_log_writer_thread(directory: DataDirectory) -> LogWriter:
    """A log writer in a thread of this process, for a service that shares its process with other code."""
    return LogWriterThread(directory.path / "log", directory.ownership.require)


class RunningService(NamedTuple):
    """The parts of a service that exist once the log is read."""

    shell: Shell
    pulls: Pulls
    assets: AssetStore
    submissions: Submissions
    policy_servers: PolicyServers


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
        self._stopped = asyncio.Event()

    # Start ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the log and become ready. Requests may come meanwhile. Raises StoreError."""
        self._phase = "opening the log"
        started = self._reading_since = self._clock()
        writer = self._start_log_writer(self._directory)
        try:
            # Heads of files may be large: the event loop answers meanwhile.
            self._log = await asyncio.to_thread(self._open_log, writer)
        except BaseException:
            await writer.close()
            raise
        if not self.draining:
            self._phase = "reading the log"
        try:
            projection = SqliteProjection(self._directory.path / "projection.sqlite", self._log.id)
        except BaseException:
            await self._log.close()
            raise
        store = Store(self._log, projection)
        assets = AssetStore(
            self._directory.path / FOLDER, store.referenced, clock=self._clock, promise_s=self._settings.asset_promise_s
        )
        bounds = SharedBounds(self._settings.max_held_bytes or math.inf, self._settings.max_disk_bytes or math.inf)
        core = Scheduler(epoch=self.epoch, new_id=new_id, new_nonce=lambda: random_pool(8).hex(), bounds=bounds)
        # The core's clock stands still while the log is read, so that every lease in it has its full term afterwards.
        try:
            await asyncio.to_thread(assets.open)
            await asyncio.to_thread(
                replay, core, store, started, damaged=self.metrics.damaged.inc, stopping=lambda: self.draining
            )
        except BaseException:
            await store.abandon()
            raise
        if self.draining:
            await store.abandon()
            return
        writer.watch()
        self._replayed_s = self._clock() - started
        await self._run(core, store, assets, bounds)

    def _open_log(self, writer: LogWriter) -> Log:
        settings = self._settings
        return Log(
            self._directory.path / "log",
            file_bytes=settings.retention.file_bytes(settings.log_file_bytes, settings.max_disk_bytes),
            epoch=self.epoch,
            require_owned=self._directory.ownership.require,
            on_sync=self._on_sync,
            on_failure=self._on_disk_failure,
            on_recovery=self._on_disk_recovery,
            writer=writer,
        )

    async def _run(self, core: Scheduler, store: Store, assets: AssetStore, bounds: SharedBounds) -> None:
        shell = Shell(core, store, self.metrics, lambda: self._clock() - self._replayed_s)
        submissions = Submissions(shell, assets, self.metrics, self.epoch)
        pulls = Pulls(shell, BatchBodies(store), self.metrics, self.epoch)
        self._running = RunningService(
            shell, pulls, assets, submissions, PolicyServers(shell, self.metrics, self.epoch)
        )
        retention = RetentionLoop(
            store,
            assets,
            self._settings.retention,
            bounds,
            rotate=lambda: store.rotate(core),
            on_deleted=self._on_deleted,
            now_s=lambda: time.time_ns() / 1e9,
        )
        collection = AssetCollection(store, assets)
        loops = (self._project, self._measure_lag, collection.run, retention.run, PageCacheTrimmer(store).run)
        self._tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        shell.commit()
        await store.log.synced()
        self._phase = "ready"
        self.metrics.ready.set(1)
        trajectories, replayed_s = store.index.trajectories, round(self._replayed_s, 3)
        log.info("ready", epoch=self.epoch, trajectories=trajectories, replayed_s=replayed_s)

    # End ------------------------------------------------------------------------------------------------------

    async def stopped(self) -> StoreError:
        """The error after which only a new start helps; returns when it happens."""
        await self._stopped.wait()
        return StoreError(f"The store failed: {self._failure}.", hint="Start the orchestrator anew.")

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._log is not None:
            log.error("a background task failed", task=task.get_name(), exc_info=error)
            self._log.stop(f"the background task {task.get_name()} failed ({type(error).__name__}: {error})")

    def drain(self) -> None:
        """Accept nothing new, and answer all long polls."""
        self._phase = "draining"
        self.metrics.ready.set(0)
        if self._running is not None:
            self._running.shell.draining = True
            self._running.shell.queues.wake_all()

    @property
    def draining(self) -> bool:
        return self._phase == "draining"

    async def close(self) -> None:
        """Bring everything to disk and close. Raises StoreError if that fails now; earlier failures were reported."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._running is not None:
            await self._running.submissions.close()
            await self._running.policy_servers.close()
            self._running.shell.stop_timer()
            await self._running.assets.close()
            await self._running.shell.store.close()

    # Loops ----------------------------------------------------------------------------------------------------

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
            self._update_metrics()

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROJECT_EVERY_S
            await asyncio.sleep(PROJECT_EVERY_S)
            self.metrics.lag.observe(max(0.0, loop.time() - due))

    def _on_sync(self, duration_s: float, size_bytes: int) -> None:
        self._syncs.append(duration_s)
        self.metrics.sync.observe(duration_s)
        self.metrics.log_written.inc(size_bytes)

    def _on_deleted(self, size_bytes: int) -> None:
        self.metrics.log_files_deleted.inc()
        self.metrics.log_deleted.inc(size_bytes)

    def _on_disk_failure(self) -> None:
        """Stop the scheduler's timer and wake all long polls until the disk has stored the waiting frames."""
        if self._log is not None:
            hint = "the orchestrator ends" if self._log.stopped else "tried again until it does"
            log.error("the store refuses writes", problem=self._log.failure, what_next=hint)
            if self._log.stopped:
                self._stopped.set()
        self._update_metrics()
        if self._running is not None:
            self._running.shell.stop_timer()
            self._running.shell.queues.wake_all()

    def _on_disk_recovery(self) -> None:
        log.info("the disk accepts writes again")
        self._update_metrics()
        if self._running is not None:
            shell = self._running.shell
            shell.store.rotate_if_due(shell.core)
            shell.set_timer()

    def _update_metrics(self) -> None:
        self.metrics.ready.set(1 if self._phase == "ready" and not self._failure else 0)
        self.metrics.disk_refuses.set(1 if self._failure else 0)

    @property
    def _failure(self) -> str:
        """The reason why nothing can be stored now; empty when all is well."""
        return (self._log.failure if self._log is not None else "") or self._projection_failure

    # Readiness ------------------------------------------------------------------------------------------------

    def phase(self) -> ServicePhase:
        """The current phase."""
        if self._log is not None and self._running is None:
            done, total = self._log.scanned_bytes, self._log.bytes_to_scan
            passed_s = self._clock() - self._reading_since
            return ServicePhase(self._phase, done, total, passed_s / done * (total - done) if done else None)
        return ServicePhase(self._phase, failure=self._failure, remedy=self._remedy if self._failure else "")

    def require_ready(self) -> None:
        """Raises Unavailable unless everything works, with ``phase``, ``done`` and ``total``."""
        self.require_stored()
        if self._phase != "ready":
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
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
            raise self._unavailable()
        if self._failure:
            phase = self._running.shell.store.log.phase or self._projection_phase
            hint = f"{self._remedy} Then try again."
            raise Unavailable(f"The store failed: {self._failure}.", hint=hint, phase=phase)
        return self._running

    @property
    def _remedy(self) -> str:
        if self._log is not None and self._log.stopped:
            return "The orchestrator ends; `headrace up`, or another supervisor, starts it anew."
        return "Fix the cause: the orchestrator continues by itself."

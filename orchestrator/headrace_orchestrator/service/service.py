"""The service of a data directory: requests that take more than one command, and views.

* A repeated submission gets the first result, however long ago it was.
* A worker that disconnected before its response began leaves no lease behind.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.batch.body import read_advantages, read_manifest
from headrace.errors import UnknownBatch, UnknownEnvironment, UnknownTrajectory
from headrace.server import logs
from headrace.wire import messages
from headrace.wire.asset_bodies import pack_assets
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.projection.entries import StoredTrajectory
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.commands import evaluations, groups, leases, runs
from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.lifecycle import Lifecycle, RunningService, StartLogWriter, start_log_writer_thread
from headrace_orchestrator.service.run_specs import plain_spec, read_new_spec
from headrace_orchestrator.service.shell import HEADRACE_VERSION, Command
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.waiters import ClientDisconnected, Disconnected
from headrace_orchestrator.settings import Settings

T = TypeVar("T")

log = logs.logger(__name__)

ASSETS_BYTES = 32 << 20
"""Most bytes of assets in one response: requests cost little, and several learners fit into memory."""


LARGE_SPEC_BYTES = 64 << 10
"""Size from which on a spec is encoded in a thread: a smaller one takes less than a millisecond."""


class Service(Lifecycle):
    """The service of a data directory."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_log_writer: StartLogWriter = start_log_writer_thread,
    ) -> None:
        super().__init__(settings, directory, Metrics(self.status), clock, start_log_writer)

    async def execute(self, command: Command[T]) -> T:
        """Carry out a command of the scheduler; returns, or raises, when what it rests on is on disk."""
        return await self.require_stored().shell.execute(command)

    # Workers --------------------------------------------------------------------------------------------------

    async def lease(self, request: messages.LeaseRequest, disconnected: Disconnected) -> messages.LeaseReply:
        """Grant work; waits up to ``wait_s`` for some."""
        shell = self.require_stored().shell
        queue = shell.queues.for_worker(request)
        attempts = 0

        async def attempt() -> messages.LeaseReply:
            nonlocal attempts
            attempts += 1
            if self.draining:
                raise self._unavailable()
            self.require_stored()
            return shell.decide(lambda state, now: leases.lease(state, request, now))

        def complete(reply: messages.LeaseReply) -> bool:
            return bool(reply.attempts or reply.cancels) or reply.drain or request.free <= 0

        deadline = shell.now() + request.wait_s
        reply = await shell.long_poll(
            attempt, complete=complete, queue=queue, deadline=deadline, disconnected=disconnected
        )
        if reply.attempts:
            queue.wake_first()
        await shell.store.log.synced()
        if attempts > 1 and reply.attempts and disconnected().done():
            keys = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in reply.attempts]
            returned = messages.ReturnRequest(worker=request.worker, attempts=keys)
            await shell.execute(lambda state, now: leases.hand_back(state, returned, now))
            raise ClientDisconnected
        return reply

    def claim_assets(self, request: messages.AssetsRequest) -> messages.AssetsReply:
        """Keep assets for a worker's records, and name those that it has to send."""
        assets = self.require_stored().assets
        return messages.AssetsReply(epoch=self.epoch, missing=assets.claim(request.names), keep_s=assets.promise_s)

    async def add_asset(self, name: str, data: bytes) -> messages.AssetsReply:
        """Store an asset; returns when it is on disk. Raises InvalidAsset, StoreError."""
        assets = self.require_stored().assets
        await assets.add(name, data)
        return messages.AssetsReply(epoch=self.epoch, missing=[], keep_s=assets.promise_s)

    async def assets(self, request: messages.AssetsRequest) -> bytes:
        """The first of these assets, as many as one response takes; an error in place of a missing or damaged one."""
        contents = await self.require_stored().assets.read_many(request.names, ASSETS_BYTES)
        return await asyncio.to_thread(pack_assets, contents)

    # Runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, spec: bytes) -> messages.RunStatus:
        """Create a run by its spec as JSON, which is read off the event loop. Raises InvalidRunSpec, RunExists,
        UnknownEnvironment, InvalidRequest."""
        shell = self.require_stored().shell
        parsed = await asyncio.to_thread(read_new_spec, spec)
        if self._settings.environments is not None:
            self._check_environments([entry.id for entry in parsed.environments])
            self._check_environments([task.environment for task in parsed.tasks or ()])
        prepared = await asyncio.to_thread(runs.prepare, shell.core.state, parsed)
        await self.execute(lambda state, now: runs.create_run(state, prepared, now))
        return self.run_status(parsed.name)

    async def close_run(self, run: str) -> messages.RunStatus:
        """End a run for good. Raises UnknownRun."""
        await self.execute(lambda state, now: runs.close_run(state, state.run(run), now))
        return self.run_status(run)

    async def submit_groups(self, run: str, request: messages.SubmitGroupsRequest) -> messages.SubmitGroupsReply:
        """Admit groups that the learner chose. Raises UnknownRun, UnknownEnvironment, GroupExists."""
        self._check_environments([str(group.task.get("environment")) for group in request.groups])
        ids = await self.execute(lambda state, now: groups.submit(state, state.run(run), request.groups, now))
        return messages.SubmitGroupsReply(epoch=self.epoch, groups=ids)

    def _check_environments(self, names: Iterable[str]) -> None:
        known = self._settings.environments
        for name in names:
            if known is not None and name not in known:
                raise UnknownEnvironment(
                    f"No worker of this service knows the environment {name!r}.",
                    hint=f"Known are: {', '.join(sorted(known)) or 'none'}.",
                    environment=name,
                )

    # Evaluations ----------------------------------------------------------------------------------------------

    async def start_evaluation(self, run: str, request: messages.EvaluationRequest) -> messages.EvaluationReply:
        """Start an evaluation of a version. Raises UnknownRun, UnknownEnvironment, VersionUnknown."""
        self._check_environments([str(task.get("environment")) for task in request.tasks])
        id = await self.execute(lambda state, now: evaluations.start(state, state.run(run), request, now))
        return await self.execute(lambda state, now: evaluations.report(state, state.run(run), id, now))

    async def evaluation(
        self, run: str, evaluation: str, wait_s: float, disconnected: Disconnected
    ) -> messages.EvaluationReply:
        """The progress of an evaluation; waits until it is finished."""
        return await self._poll_run(
            run,
            wait_s,
            disconnected,
            query=lambda state, now: evaluations.report(state, state.run(run), evaluation, now),
            complete=lambda reply: reply.finished,
        )

    async def hold(self, run: str, wait_s: float, disconnected: Disconnected) -> messages.HoldReply:
        """Seconds for which weights may not be replaced yet; waits until they may."""

        def query(state: SchedulerState, now: float) -> messages.HoldReply:
            hold_s, holders = evaluations.sync_hold(state.run(run), now)
            return messages.HoldReply(epoch=self.epoch, hold_s=hold_s, evaluations=holders)

        return await self._poll_run(run, wait_s, disconnected, query=query, complete=lambda reply: reply.hold_s <= 0)

    async def _poll_run(
        self,
        run: str,
        wait_s: float,
        disconnected: Disconnected,
        *,
        query: Command[T],
        complete: Callable[[T], bool],
    ) -> T:
        shell = self.require_stored().shell

        async def attempt() -> T:
            self.require_stored()
            return shell.decide(query)

        try:
            return await shell.long_poll(
                attempt,
                complete=complete,
                queue=shell.queues.for_run(run),
                deadline=shell.now() + wait_s,
                disconnected=disconnected,
            )
        finally:
            await shell.store.log.synced()

    # Views ----------------------------------------------------------------------------------------------------

    async def run_with_spec(self, run: str, *, tasks: bool) -> bytes:
        """The status of a run with its spec, as JSON; ``tasks``: with its fixed list, if it has one. Raises
        UnknownRun."""
        status = self.run_status(run)
        encoded = self.require_stored().shell.run(run).plain_spec

        def encode() -> bytes:
            return msgspec.json.encode(msgspec.structs.replace(status, spec=plain_spec(encoded, tasks=tasks)))

        return await asyncio.to_thread(encode) if len(encoded) > LARGE_SPEC_BYTES else encode()

    def run_status(self, run: str) -> messages.RunStatus:
        """The status of a run, without its spec. Raises UnknownRun."""
        return self._run_status(self.require_stored(), run)

    def _run_status(self, running: RunningService, run: str) -> messages.RunStatus:
        shell = running.shell
        status = views.run_status(shell.core.state, shell.run(run), shell.now())
        servers, sync = running.policy_servers.summary(run)
        return msgspec.structs.replace(
            status, learner_waiting=running.pulls.waiting(run), servers=servers, weight_sync=sync
        )

    def groups(self, run: str) -> list[dict[str, Any]]:
        """The oldest groups in flight. Raises UnknownRun."""
        return views.groups(self.require_stored().shell.run(run))

    def status(self) -> messages.ServiceStatus:
        """The whole service, for operators: without runs and workers while it starts, and as it is in memory while the
        store fails."""
        statuses: list[messages.RunStatus] = []
        workers: list[messages.WorkerStatus] = []
        if self._running is not None:
            shell = self._running.shell
            statuses = [self._run_status(self._running, name) for name in shell.core.state.runs]
            workers = views.worker_statuses(shell.core.state, shell.now())
        return messages.ServiceStatus(
            epoch=self.epoch,
            version=HEADRACE_VERSION,
            uptime_s=self._clock() - self._started_at,
            runs=statuses,
            workers=workers,
            store=self._store_status(),
        )

    def _store_status(self) -> dict[str, float]:
        status: dict[str, float] = {"sync_p50_s": statistics.median(self._syncs) if self._syncs else 0.0}
        if self._running is not None:
            store, assets = self._running.shell.store, self._running.assets
            status |= {
                "assets": assets.count,
                "asset_bytes": assets.size_bytes,
                "log_bytes": store.log.size_bytes,
                "trajectories": store.index.trajectories,
                "batches_open": len(store.index.batches),
                "unprojected_rows": store.unprojected,
                "projection_wal_bytes": store.projection.wal_bytes(),
            }
        return status

    async def trajectories(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None
    ) -> messages.TrajectoryList:
        """A page of a run's trajectories, newest first. Raises UnknownRun."""
        shell = self.require_stored().shell
        shell.run(run)  # raises UnknownRun
        await shell.store.project()
        now_ms = time.time_ns() // 1_000_000
        page, following = await asyncio.to_thread(
            shell.store.projection.page, run, filters, limit, before, now_ms=now_ms
        )
        return messages.TrajectoryList(
            epoch=self.epoch, trajectories=page, next="" if following is None else str(following)
        )

    async def trajectory(self, trajectory: str) -> bytes:
        """A record as it is stored. Raises UnknownTrajectory, CorruptRecord."""
        store = self.require_stored().shell.store
        stored = await self._find(store, trajectory)
        return await asyncio.to_thread(store.log.read, stored.location)

    async def advantages(self, trajectory: str) -> messages.TrajectoryAdvantages:
        """Returns and advantages of a trajectory in its latest batch. Raises UnknownTrajectory, UnknownBatch,
        CorruptRecord."""
        store = self.require_stored().shell.store
        stored = await self._find(store, trajectory)
        location = await asyncio.to_thread(store.projection.batch_of, stored.run, stored.group)
        head = await asyncio.to_thread(store.log.read, location) if location is not None else b""
        manifest = read_manifest(head) if head else None
        if manifest is None or trajectory not in manifest.trajectories:
            raise UnknownBatch(
                f"The trajectory {trajectory} is not in a batch yet.",
                hint="Advantages are computed when a batch is formed: pull until its group is served.",
            )
        rows = [
            messages.SegmentAdvantages(
                segment=row.segment,
                returns=row.returns.tolist(),
                advantages=None if row.advantages is None else row.advantages.tolist(),
            )
            for row in read_advantages(head, trajectory)
        ]
        return messages.TrajectoryAdvantages(
            epoch=self.epoch,
            trajectory=trajectory,
            batch=manifest.batch,
            estimator=manifest.estimator.name,
            rows=rows,
        )

    async def _find(self, store: Store, trajectory: str) -> StoredTrajectory:
        await store.project()
        stored = await asyncio.to_thread(store.projection.find, trajectory)
        if stored is None:
            raise UnknownTrajectory(f"No trajectory has the id {trajectory!r}.", hint="List those of a run first.")
        return stored

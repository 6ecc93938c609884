"""The service: every command of workers and learners, and what pages ask.

* A repeated submission gets the first result, however long ago it was.
* A worker that left before its answer began leaves no lease behind.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.assets import pack_assets
from headrace.batch.batch import read_advantages, read_manifest
from headrace.errors import UnknownBatch, UnknownEnvironment, UnknownTrajectory
from headrace.runspec import parse_run_spec
from headrace.server import logs
from headrace.wire import messages
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.projection.entries import StoredTrajectory
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service.batches import ServedBatch
from headrace_orchestrator.service.callbacks import StoredCallback
from headrace_orchestrator.service.lifecycle import Lifecycle, RunningService, StartLogWriter, start_log_writer_thread
from headrace_orchestrator.service.shell import HEADRACE_VERSION
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.waiters import ClientDisconnected, Left
from headrace_orchestrator.settings import Settings

T = TypeVar("T")

log = logs.logger(__name__)

ASSETS_BYTES = 32 << 20
"""Of assets in one answer: enough that asking costs little, small enough for the memory of several learners."""


class Service(Lifecycle):
    """One data directory's service."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        *,
        clock: Callable[[], float] = time.monotonic,
        start_writing: StartLogWriter = start_log_writer_thread,
    ) -> None:
        super().__init__(settings, directory, Metrics(self.status), clock, start_writing)

    async def _do(self, command: Callable[[Scheduler, float], T]) -> T:
        shell = self._require().shell
        return await shell.do(lambda now: command(shell.core, now))

    # Workers --------------------------------------------------------------------------------------------------

    async def lease(self, request: messages.LeaseRequest, left: Left) -> messages.LeaseReply:
        """Grant work; waits up to ``wait_s`` until there is some."""
        shell = self._require().shell
        deadline = shell.now() + request.wait_s
        bell = shell.bells.of_worker(request)
        waited = False
        while True:
            if self.draining:
                raise self._busy()
            self._require()
            reply = shell.core.lease(request, shell.now())
            shell.commit()
            remaining_s = deadline - shell.now()
            if reply.attempts or reply.cancels or reply.drain or request.free <= 0 or remaining_s <= 0:
                break
            waited = True
            await bell.wait(remaining_s, left)
        if reply.attempts:
            bell.ring()
        await shell.store.log.synced()
        if waited and reply.attempts and left().done():
            keys = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in reply.attempts]
            await self.hand_back(messages.ReturnRequest(worker=request.worker, attempts=keys))
            raise ClientDisconnected
        return reply

    async def heartbeat(self, request: messages.HeartbeatRequest) -> messages.HeartbeatReply:
        """Renew a worker's leases."""
        return await self._do(lambda core, now: core.heartbeat(request, now))

    async def hand_back(self, request: messages.ReturnRequest) -> None:
        """Take attempts back."""
        await self._do(lambda core, now: core.hand_back(request, now))

    async def drain_worker(self, worker: str) -> None:
        """Give a worker nothing new."""
        await self._do(lambda core, now: core.drain_worker(worker, now))

    async def submit(self, worker: str, body: bytes) -> messages.SubmitReply:
        """Judge submitted records; returns when the accepted ones are on disk. Raises InvalidRequest, StoreError."""
        return await self._require().submissions.submit(worker, body)

    def submit_nowait(self, worker: str, body: bytes, on_stored: StoredCallback[messages.SubmitReply]) -> None:
        """Do what ``submit`` does without a task: ``on_stored`` gets the reply, or StoreError. Raises
        InvalidRequest."""
        self._require().submissions.submit_nowait(worker, body, on_stored)

    def claim_assets(self, request: messages.AssetsRequest) -> messages.AssetsReply:
        """Keep assets for a worker's records, and say which of them it is to send."""
        assets = self._require().assets
        return messages.AssetsReply(epoch=self.epoch, missing=assets.claim(request.names), keep_s=assets.promise_s)

    async def add_asset(self, name: str, data: bytes) -> messages.AssetsReply:
        """Store an asset; returns when it is on disk. Raises InvalidAsset, StoreError."""
        assets = self._require().assets
        await assets.add(name, data)
        return messages.AssetsReply(epoch=self.epoch, missing=[], keep_s=assets.promise_s)

    async def asset(self, name: str) -> bytes:
        """An asset, checked. Raises UnknownAsset, CorruptAsset."""
        return await self._require().assets.read(name)

    async def assets(self, request: messages.AssetsRequest) -> bytes:
        """The first of these assets, as many as one answer takes, or what is wrong with them."""
        found = await self._require().assets.read_many(request.names, ASSETS_BYTES)
        return await asyncio.to_thread(pack_assets, found)

    # Runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, spec: Mapping[str, Any]) -> messages.RunStatus:
        """Create a run. Raises InvalidRunSpec, RunExists, UnknownEnvironment."""
        parsed = parse_run_spec(spec)
        self._check_environments([entry.id for entry in parsed.environments])
        self._check_environments([task.environment for task in parsed.tasks or ()])
        await self._do(lambda core, now: core.create_run(parsed, now))
        log.info("run created", run=parsed.name)
        return self.run_status(parsed.name)

    async def close_run(self, run: str) -> messages.RunStatus:
        """End a run."""
        await self._do(lambda core, now: core.close_run(run, now))
        log.info("run closed", run=run)
        return self.run_status(run)

    async def submit_groups(self, run: str, request: messages.SubmitGroupsRequest) -> messages.SubmitGroupsReply:
        """Add groups of the learner's own."""
        self._check_environments([str(group.task.get("environment")) for group in request.groups])
        groups = await self._do(lambda core, now: core.submit_groups(run, request.groups, now))
        return messages.SubmitGroupsReply(epoch=self.epoch, groups=groups)

    def _check_environments(self, names: Iterable[str]) -> None:
        known = self._settings.environments
        for name in names:
            if known is not None and name not in known:
                raise UnknownEnvironment(
                    f"No worker of this service knows the environment {name!r}.",
                    hint=f"Known are: {', '.join(sorted(known)) or 'none'}.",
                    environment=name,
                )

    # Learners -------------------------------------------------------------------------------------------------

    async def pull(self, run: str, request: messages.PullRequest, left: Left) -> ServedBatch | messages.EmptyReply:
        """Lease a batch; waits up to ``wait_s`` until one is ready."""
        return await self._require().pulls.pull(run, request, left)

    async def resume(self, run: str, request: messages.ResumeRequest) -> messages.ResumeReply:
        """Give a learner that was started again what it left unacked."""
        reply = await self._do(lambda core, now: core.resume(run, request, now))
        log.info("resumed", run=run, learner=request.learner, batches=len(reply.batches), lost=len(reply.lost))
        return reply

    async def ack(self, run: str, batch: str, request: messages.AckRequest) -> messages.AckReply:
        """The batch was trained on."""
        reply = await self._do(lambda core, now: core.ack(run, batch, request, now))
        log.info("batch acked", run=run, batch=batch, version=reply.version)
        return reply

    async def nack(self, run: str, batch: str, request: messages.NackRequest) -> None:
        """Take a batch back."""
        await self._do(lambda core, now: core.nack(run, batch, request, now))
        log.info("batch given back", run=run, batch=batch, reason=request.reason)

    async def announce(self, run: str, request: messages.VersionRequest) -> messages.VersionReply:
        """A version is loaded."""
        return await self._do(lambda core, now: core.announce(run, request, now))

    async def rewind(self, run: str, request: messages.RewindRequest) -> messages.VersionReply:
        """Open a new lineage."""
        reply = await self._do(lambda core, now: core.rewind(run, request, now))
        log.info("rewound", run=run, version=reply.version)
        return reply

    async def set_priorities(self, run: str, request: messages.PrioritiesRequest) -> messages.PrioritiesReply:
        """What a prioritized draw goes by."""
        return await self._do(lambda core, now: core.set_priorities(run, request, now))

    async def doing(self, run: str, request: messages.DoingRequest) -> None:
        """The learner says what it does."""
        await self._do(lambda core, now: core.doing(run, request, now))

    # Evaluations ----------------------------------------------------------------------------------------------

    async def start_evaluation(self, run: str, request: messages.EvaluationRequest) -> messages.EvaluationReply:
        """Start episodes pinned to a version."""
        self._check_environments([str(task.get("environment")) for task in request.tasks])
        evaluation = await self._do(lambda core, now: core.start_evaluation(run, request, now))
        return await self._do(lambda core, now: core.evaluation(run, evaluation, now))

    async def evaluation(self, run: str, evaluation: str, wait_s: float, left: Left) -> messages.EvaluationReply:
        """How an evaluation stands; waits until it is finished."""
        return await self._poll(
            run,
            wait_s,
            left,
            ask=lambda core, now: core.evaluation(run, evaluation, now),
            enough=lambda reply: reply.finished,
        )

    async def hold(self, run: str, wait_s: float, left: Left) -> messages.HoldReply:
        """Whether weights may be replaced; waits until they may."""

        def ask(core: Scheduler, now: float) -> messages.HoldReply:
            hold_s, evaluations = core.sync_hold(run, now)
            return messages.HoldReply(epoch=self.epoch, hold_s=hold_s, evaluations=evaluations)

        return await self._poll(run, wait_s, left, ask=ask, enough=lambda reply: reply.hold_s <= 0)

    async def _poll(
        self,
        run: str,
        wait_s: float,
        left: Left,
        *,
        ask: Callable[[Scheduler, float], T],
        enough: Callable[[T], bool],
    ) -> T:
        shell = self._require().shell
        deadline = shell.now() + wait_s
        try:
            while True:
                self._require()
                reply = ask(shell.core, shell.now())
                shell.commit()
                if enough(reply) or self.draining or shell.now() >= deadline:
                    return reply
                await shell.bells.of_run(run).wait(deadline - shell.now(), left)
        finally:
            await shell.store.log.synced()

    # Policy servers -------------------------------------------------------------------------------------------

    async def servers(self, run: str, revision: int, wait_s: float, left: Left) -> messages.PolicyServersReply:
        """The policy servers of a run; waits until there is news of them."""
        return await self._require().plane.servers(run, revision, wait_s, left)

    async def add_server(self, run: str, address: str) -> None:
        """Give a run another policy server."""
        await self._do(lambda core, now: core.add_server(run, address, now))
        log.info("policy server added", run=run, address=address)

    async def drain_server(self, run: str, address: str) -> None:
        """Let a policy server finish what it has."""
        await self._do(lambda core, now: core.drain_server(run, address, now))
        log.info("policy server drains", run=run, address=address)

    async def remove_server(self, run: str, address: str) -> None:
        """Take a policy server from a run."""
        await self._do(lambda core, now: core.remove_server(run, address, now))
        log.info("policy server removed", run=run, address=address)

    # Views ----------------------------------------------------------------------------------------------------

    def run_status(self, run: str) -> messages.RunStatus:
        """One run. Raises UnknownRun."""
        return self._run_status(self._require(), run)

    def _run_status(self, running: RunningService, run: str) -> messages.RunStatus:
        status = running.shell.core.run_status(run, running.shell.now())
        servers, sync = running.plane.shown(run)
        return msgspec.structs.replace(
            status, learner_waiting=running.pulls.waiting(run), servers=servers, weight_sync=sync
        )

    def groups(self, run: str) -> list[dict[str, Any]]:
        """The oldest groups in flight. Raises UnknownRun."""
        return self._require().shell.core.groups(run)

    def status(self) -> messages.ServiceStatus:
        """The whole service, for whoever watches it: without runs and workers while it starts, and as it is in memory
        while the store fails."""
        runs: list[messages.RunStatus] = []
        workers: list[messages.WorkerStatus] = []
        if self._running is not None:
            shell = self._running.shell
            runs = [self._run_status(self._running, name) for name in shell.core.run_names()]
            workers = shell.core.worker_statuses(shell.now())
        return messages.ServiceStatus(
            epoch=self.epoch,
            version=HEADRACE_VERSION,
            uptime_s=self._clock() - self._started_at,
            runs=runs,
            workers=workers,
            store=self._store_status(),
        )

    def _store_status(self) -> dict[str, float]:
        found: dict[str, float] = {"sync_p50_s": statistics.median(self._syncs) if self._syncs else 0.0}
        if self._running is not None:
            store, assets = self._running.shell.store, self._running.assets
            found |= {
                "assets": assets.count,
                "asset_bytes": assets.size_bytes,
                "log_bytes": store.log.size_bytes,
                "trajectories": store.index.trajectories,
                "batches_open": len(store.index.batches),
                "unprojected_rows": store.unprojected,
                "projection_wal_bytes": store.projection.wal_bytes(),
            }
        return found

    async def trajectories(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None
    ) -> messages.TrajectoryList:
        """A page of a run's trajectories, newest first. Raises UnknownRun."""
        shell = self._require().shell
        shell.core.spec(run)  # raises UnknownRun
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
        store = self._require().shell.store
        found = await self._find(store, trajectory)
        return await asyncio.to_thread(store.log.read, found.location)

    async def advantages(self, trajectory: str) -> messages.TrajectoryAdvantages:
        """What the batch that it was last frozen into says of a trajectory. Raises UnknownTrajectory, UnknownBatch,
        CorruptRecord."""
        store = self._require().shell.store
        found = await self._find(store, trajectory)
        at = await asyncio.to_thread(store.projection.batch_of, found.run, found.group)
        head = await asyncio.to_thread(store.log.read, at) if at is not None else b""
        manifest = read_manifest(head) if head else None
        if manifest is None or trajectory not in manifest.trajectories:
            raise UnknownBatch(
                f"The trajectory {trajectory} is in no batch yet.",
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
        found = await asyncio.to_thread(store.projection.find, trajectory)
        if found is None:
            raise UnknownTrajectory(f"There is no trajectory {trajectory!r}.", hint="List those of a run first.")
        return found

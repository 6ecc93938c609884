"""The child processes of a campaign: the real orchestrator, worker and learner, with crash points.

* The code under test is unchanged; its functions and a few system calls are wrapped from outside.
* A process ends when its parent ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import Client
from headrace.batch.batch import Batch
from headrace.client.connection_pool import ConnectionPool
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, HeadraceError, StoreError
from headrace.store import log_format
from headrace_orchestrator import server
from headrace_orchestrator.api import app
from headrace_orchestrator.api.route import Route
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log import writer_process
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service import Service, pulls
from headrace_orchestrator.service.batches.bodies import BatchBodies
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.submission_records import SubmissionJudge
from headrace_orchestrator.settings import Address, Settings
from headrace_workers.worker.connection import OrchestratorConnection
from headrace_workers.worker.process import run_worker
from headrace_workers.worker.worker import WorkerSettings
from tests.chaos import environment, policy
from tests.chaos.crash_points import PR_SET_PDEATHSIG, CrashPoints, die
from tests.chaos.disk import SimulatedDisk
from tests.chaos.faults import FAULTS
from tests.chaos.log_writer import LOST
from tests.chaos.plan import Plan

PHASES: dict[str, dict[str, int]] = {
    "orchestrator": {
        "claiming": 2,
        "replaying": 12,
        "appending": 60,
        "syncing": 120,
        "syncing an ack": 6,
        "rotating": 14,
        LOST: 120,
        "snapshotting": 6,
        "syncing other files": 8,
        "submitting": 80,
        "leasing": 80,
        "forming": 16,
        "serving": 12,
        "storing an asset": 8,
        "acking": 12,
        "nacking": 4,
        "projecting": 8,
        "answering": 100,
        "closing": 4,
    },
    "worker": {"leasing": 30, "running": 250, "sending": 6, "uploading": 60, "answered": 60, "renewing": 3},
    "learner": {"pulling": 12, "holding": 12, "acking": 8, "acked": 10, "nacking": 3},
}
"""Phases by role, with the highest pass of its crash points at which a process dies: about a second of work.

Orchestrator: ``appending``, ``syncing`` and ``rotating`` (a new file of the log, and its name) are crash points of the
log writer, where both processes die; in ``losing the writer`` it dies alone, and the orchestrator ends by itself.
``syncing other files`` syncs a directory or a file beside the log, ``answering`` has stored a change and not responded
yet, ``closing`` ends gracefully. Worker: ``leasing`` has got attempts, ``sending`` sends an asset, ``answered`` has got
the response that its records are stored. Learner: ``holding`` has a batch, ``acked`` has got the response and has not
stored the new version.
"""

STOPPED = 3
"""Exit status of an orchestrator that ended with a typed error because its log writer was lost."""


def set_up_process(plan: Plan) -> CrashPoints:
    """Write output to a file, end with the parent, and seed the random choices."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    output = os.open(plan.folder / f"{plan.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    random.seed(plan.seed)
    return CrashPoints(plan.phase, plan.passes)


# The orchestrator ---------------------------------------------------------------------------------------------


def orchestrator(plan: Plan) -> None:
    points = set_up_process(plan)
    SimulatedDisk(plan.data, plan.synced_dir, _OtherSyncPoints(points), sync_s=plan.sync_s).install()
    if plan.fault:
        FAULTS[plan.fault]()
    _watch_service(points)
    _start_own_writer(plan)
    settings = Settings(data=plan.data, port=plan.port, log_file_bytes=plan.log_file_bytes, shutdown_timeout_s=1)

    def ready(address: Address) -> None:
        plan.ready.touch()
        if plan.phase == "closing":
            threading.Timer(0.3 + 0.02 * plan.passes, os.kill, (os.getpid(), signal.SIGTERM)).start()

    try:
        server.run(settings, ready=ready)
    except StoreError:
        if not plan.lost.exists():
            raise
        sys.exit(STOPPED)


def _start_own_writer(plan: Plan) -> None:
    """Use a log writer with crash points."""
    assert writer_process.SUPPORTED
    command = (sys.executable, "-m", "tests.chaos.log_writer", plan.as_json(), str(os.getpid()))
    writer_process.COMMAND = command  # type: ignore[assignment]


class _OtherSyncPoints:
    """Crash points in each sync of a file or directory other than the log's."""

    def __init__(self, points: CrashPoints) -> None:
        self._points = points

    def on_start(self, path: Path) -> None:
        self._points.reach("syncing other files")

    def before_durable(self, path: Path) -> None:
        self._points.reach("syncing other files")

    def on_durable(self, path: Path) -> None:
        self._points.reach("syncing other files")


def _watch_service(points: CrashPoints) -> None:
    scan = log_format.scan

    def watched(*args: Any, **kwargs: Any) -> Any:
        for item in scan(*args, **kwargs):
            points.reach("replaying")
            yield item

    log_format.scan = watched
    claim = DataDirectory.claim.__func__  # type: ignore[attr-defined]

    def claimed(kind: type[DataDirectory], path: Path) -> DataDirectory:
        points.reach("claiming")
        directory = claim(kind, path)
        points.reach("claiming")
        return directory

    DataDirectory.claim = classmethod(claimed)  # type: ignore[assignment, method-assign]
    points.wrap(SubmissionJudge, "judge", "submitting")
    points.wrap(pulls, "build_batch", "forming")
    points.wrap(pulls, "form", "forming")
    points.wrap_async(BatchBodies, "serve", "serving")
    points.wrap(Scheduler, "snapshot", "snapshotting")
    points.wrap_async(AssetStore, "add", "storing an asset")
    points.wrap(SqliteProjection, "write", "projecting")
    points.wrap_async(Store, "close", "closing")
    points.wrap_async(Log, "close", "closing")
    _watch_routes(points)


def _watch_routes(points: CrashPoints) -> None:
    """Make crash points of decisions about leases, acks and nacks, and of responses whose events are on disk."""
    phases = {"lease": "leasing", "ack": "acking", "nack": "nacking"}
    current_phase: ContextVar[str] = ContextVar("current_phase", default="elsewhere")
    state_at, commit = Scheduler.state_at, Shell.commit

    def watched(route: Route) -> Route:
        name, handler = route.name or route.handler.__name__, route.handler
        if name not in {*phases, "submit", "pull"}:
            return route

        async def handle(service: Service, request: Any) -> Any:
            current_phase.set(phases.get(name, "elsewhere"))
            result = await handler(service, request)
            points.reach("answering")
            return result

        return replace(route, name=name, handler=handle)

    def before(core: Scheduler, now: float) -> Any:
        points.reach(current_phase.get())
        return state_at(core, now)

    def after(shell: Shell, *args: Any, **kwargs: Any) -> None:
        points.reach(current_phase.get())
        commit(shell, *args, **kwargs)

    Scheduler.state_at = before  # type: ignore[method-assign]
    Shell.commit = after  # type: ignore[method-assign]
    app.ROUTES = tuple(watched(route) for route in app.ROUTES)  # type: ignore[misc]


def _wrap_after(points: CrashPoints, owner: Any, name: str, phase: str) -> None:
    """Make the end of a coroutine function a crash point of the phase."""
    original: Callable[..., Any] = getattr(owner, name)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        points.reach(phase)
        return result

    setattr(owner, name, watched)


# The worker ---------------------------------------------------------------------------------------------------


def worker(plan: Plan) -> None:
    points = set_up_process(plan)
    os.environ["CHAOS_VERSION"] = str(plan.folder / "version")
    os.environ["CHAOS_TURN_S"] = str(plan.turn_s)
    _wrap_after(points, OrchestratorConnection, "lease", "leasing")
    _wrap_after(points, OrchestratorConnection, "submit", "answered")
    _wrap_request(points, "submit", "uploading")
    _wrap_request(points, "send_asset", "sending")
    _wrap_request(points, "heartbeat", "renewing")
    points.wrap(policy.Policy, "sample", "running")
    settings = WorkerSettings(name=plan.name, orchestrator=plan.url, slots=plan.slots, grace_s=2)
    raise SystemExit(run_worker(settings, policy="tests.chaos.policy:make"))


def _wrap_request(points: CrashPoints, name: str, phase: str) -> None:
    """Die a short time after a request of the worker was begun, with or without its response."""
    original: Callable[..., Any] = getattr(OrchestratorConnection, name)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        if points.is_due(phase):
            asyncio.get_running_loop().call_later(random.uniform(0, 0.004), die)
        return await original(*args, **kwargs)

    setattr(OrchestratorConnection, name, watched)


# The learner --------------------------------------------------------------------------------------------------


def learner(plan: Plan) -> None:
    """Train on batches: first on those that the previous process left, then on new ones, whole or in shards, with or
    without prefetch; nack some."""
    points = set_up_process(plan)
    _watch_requests(points)
    ranks, ahead = random.choice(((1, 0), (1, 1), (2, 0)))
    session = f"{random.getrandbits(64):x}"
    clients = [
        Client(plan.url, learner="learner", session=session, retry_for_s=120, poll_s=2, keepalive=False)
        for _ in range(ranks)
    ]
    has_resumed = False
    while True:
        try:
            if not has_resumed:
                resumed = [client.resume("run", shard=rank, shards=ranks) for rank, client in enumerate(clients)]
                has_resumed = True
                for shards in zip(*(part.batches for part in resumed), strict=True):
                    _train(plan, points, clients[0], shards)
            for shards in _pulls(clients, ahead):
                _train(plan, points, clients[0], shards)
        except (BatchSuperseded, BatchAlreadyAcked):
            continue  # its lease ended meanwhile, or an earlier ack was accepted
        except StoreError:
            time.sleep(0.05)  # the disk fails: the request may be stored or not, and is repeated
        except HeadraceError as error:
            with (plan.folder / "unexpected-errors").open("a") as file:
                file.write(f"the learner got {error.code}: {error.detail}\n")
            time.sleep(0.05)


def _pulls(clients: Sequence[Client], ahead: int) -> Iterator[Sequence[Batch]]:
    """Batches, each as the shards of all ranks."""
    if ahead:
        for batch in clients[0].batches("run", timeout_s=120, prefetch=ahead):
            yield [batch]
    while True:
        yield [
            client.pull("run", timeout_s=120, shard=rank, shards=len(clients)) for rank, client in enumerate(clients)
        ]


def _train(plan: Plan, points: CrashPoints, client: Client, shards: Sequence[Batch]) -> None:
    points.reach("holding")
    for shard in shards:
        shard.verify()
    assert len({shard.id for shard in shards}) == 1
    time.sleep(random.uniform(0, 0.02))
    if random.random() < 0.25:
        client.nack(shards[0], "a random nack")
        return
    number = int(client.run("run").version.split(".")[1]) + 1
    version = client.ack(shards[0], f"0.{number}").version
    points.reach("acked")
    _replace(plan.folder / "version", version)


def _watch_requests(points: CrashPoints) -> None:
    """Die a short time after a request of the learner was begun, with or without its response."""
    send = ConnectionPool.send
    phases = {"pull": "pulling", "ack": "acking", "nack": "nacking"}

    def watched(self: ConnectionPool, request: Any) -> Any:
        phase = phases.get(request.target.rpartition("/")[2], "")
        if phase and points.is_due(phase):
            threading.Timer(random.uniform(0, 0.01), die).start()
        return send(self, request)

    ConnectionPool.send = watched  # type: ignore[method-assign]


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    with suppress(FileNotFoundError):
        os.replace(new, file)


ROLES = {"orchestrator": orchestrator, "worker": worker, "learner": learner}

_ = app, environment  # imported before any fork, like everything else

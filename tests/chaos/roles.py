"""What the child processes run: the real orchestrator, worker and learner, with points to die at.

* Nothing of the code under test is changed; its functions and a few system calls are watched from outside.
* A process ends when whoever started it ends.
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
from tests.chaos.disk import Disk
from tests.chaos.logwriter import LOST
from tests.chaos.mutants import MUTANTS
from tests.chaos.plan import Plan
from tests.chaos.points import PR_SET_PDEATHSIG, Points, die

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
        "naming": 8,
        "submitting": 80,
        "leasing": 80,
        "forming": 16,
        "serving": 12,
        "shelving": 8,
        "acking": 12,
        "nacking": 4,
        "projecting": 8,
        "answering": 100,
        "closing": 4,
    },
    "worker": {"leasing": 30, "running": 250, "sending": 6, "uploading": 60, "answered": 60, "renewing": 3},
    "learner": {"pulling": 12, "holding": 12, "acking": 8, "acked": 10, "nacking": 3},
}
"""By role and phase: at most at this pass of its points a process dies; so many come within about a second of work.

Of the orchestrator, ``appending``, ``syncing`` and ``rotating`` (a new file of the log, and its name) are points of the
process that writes its log, and both die there; ``losing the writer`` is the death of that one alone, and then of an
orchestrator that has said so. ``naming`` syncs a directory or a file beside the log, ``shelving`` takes an asset,
``answering`` has stored and told nobody, ``closing`` ends in order. Of the worker, ``leasing`` was granted something,
``sending`` sends an asset, ``answered`` was told that its records are stored. Of the learner, ``holding`` has a batch,
``acked`` was told so and has not stored what it learned.
"""

STOPPED = 3
"""Status of an orchestrator that ended its start with a typed error, for nobody wrote its log any more."""


def settle(plan: Plan) -> Points:
    """Output to a file, no life without a parent, no keyboard."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    output = os.open(plan.folder / f"{plan.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    random.seed(plan.seed)
    return Points(plan.phase, plan.passes)


# The orchestrator ---------------------------------------------------------------------------------------------


def orchestrator(plan: Plan) -> None:
    points = settle(plan)
    Disk(plan.data, plan.vault, _Naming(points), sync_s=plan.sync_s).install()
    if plan.mutant:
        MUTANTS[plan.mutant]()
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
    """Whoever writes the log has points too."""
    assert writer_process.SUPPORTED
    command = (sys.executable, "-m", "tests.chaos.logwriter", plan.as_json(), str(os.getpid()))
    writer_process.COMMAND = command  # type: ignore[assignment]


class _Naming:
    """Points in each sync of what is not a file of the log."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def starts(self, path: Path) -> None:
        self._points.here("naming")

    def still_unsafe(self, path: Path) -> None:
        self._points.here("naming")

    def safe(self, path: Path) -> None:
        self._points.here("naming")


def _watch_service(points: Points) -> None:
    scan = log_format.scan

    def watched(*args: Any, **kwargs: Any) -> Any:
        for item in scan(*args, **kwargs):
            points.here("replaying")
            yield item

    log_format.scan = watched
    claim = DataDirectory.claim.__func__  # type: ignore[attr-defined]

    def claimed(kind: type[DataDirectory], path: Path) -> DataDirectory:
        points.here("claiming")
        directory = claim(kind, path)
        points.here("claiming")
        return directory

    DataDirectory.claim = classmethod(claimed)  # type: ignore[assignment, method-assign]
    points.around(SubmissionJudge, "judge", "submitting")
    points.around(pulls, "build_batch", "forming")
    points.around(pulls, "form", "forming")
    points.around_async(BatchBodies, "serve", "serving")
    points.around(Scheduler, "snapshot", "snapshotting")
    points.around_async(AssetStore, "add", "shelving")
    points.around(SqliteProjection, "write", "projecting")
    points.around_async(Store, "close", "closing")
    points.around_async(Log, "close", "closing")
    _watch_routes(points)


def _watch_routes(points: Points) -> None:
    """Make points of the decisions about leases, acks and nacks, and of answers whose events are on disk."""
    phases = {"lease": "leasing", "ack": "acking", "nack": "nacking"}
    deciding: ContextVar[str] = ContextVar("deciding", default="elsewhere")
    state_at, commit = Scheduler.state_at, Shell.commit

    def watched(route: Route) -> Route:
        name, handler = route.name or route.handler.__name__, route.handler
        if name not in {*phases, "submit", "pull"}:
            return route

        async def handle(service: Service, request: Any) -> Any:
            deciding.set(phases.get(name, "elsewhere"))
            result = await handler(service, request)
            points.here("answering")
            return result

        return replace(route, name=name, handler=handle)

    def before(core: Scheduler, now: float) -> Any:
        points.here(deciding.get())
        return state_at(core, now)

    def after(shell: Shell, *args: Any, **kwargs: Any) -> None:
        points.here(deciding.get())
        commit(shell, *args, **kwargs)

    Scheduler.state_at = before  # type: ignore[method-assign]
    Shell.commit = after  # type: ignore[method-assign]
    app.ROUTES = tuple(watched(route) for route in app.ROUTES)  # type: ignore[misc]


def _after(points: Points, owner: Any, name: str, phase: str) -> None:
    """What rests on it is on disk, and nobody was told."""
    original: Callable[..., Any] = getattr(owner, name)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        points.here(phase)
        return result

    setattr(owner, name, watched)


# The worker ---------------------------------------------------------------------------------------------------


def worker(plan: Plan) -> None:
    points = settle(plan)
    os.environ["CHAOS_VERSION"] = str(plan.folder / "version")
    os.environ["CHAOS_TURN_S"] = str(plan.turn_s)
    _after(points, OrchestratorConnection, "lease", "leasing")
    _after(points, OrchestratorConnection, "submit", "answered")
    _under_way(points, "submit", "uploading")
    _under_way(points, "send_asset", "sending")
    _under_way(points, "heartbeat", "renewing")
    points.around(policy.Policy, "sample", "running")
    settings = WorkerSettings(name=plan.name, orchestrator=plan.url, slots=plan.slots, grace_s=2)
    raise SystemExit(run_worker(settings, policy="tests.chaos.policy:make"))


def _under_way(points: Points, name: str, phase: str) -> None:
    """Some time after the request was begun, with or without its answer."""
    original: Callable[..., Any] = getattr(OrchestratorConnection, name)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        if points.is_due(phase):
            asyncio.get_running_loop().call_later(random.uniform(0, 0.004), die)
        return await original(*args, **kwargs)

    setattr(OrchestratorConnection, name, watched)


# The learner --------------------------------------------------------------------------------------------------


def learner(plan: Plan) -> None:
    """Trains on batches: first on those that its last life left, then on new ones, whole or in shards, with or without
    the next one fetched ahead; gives some back."""
    points = settle(plan)
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
                left = [client.resume("run", shard=rank, shards=ranks) for rank, client in enumerate(clients)]
                has_resumed = True
                for shards in zip(*(part.batches for part in left), strict=True):
                    _train(plan, points, clients[0], shards)
            for shards in _pulls(clients, ahead):
                _train(plan, points, clients[0], shards)
        except (BatchSuperseded, BatchAlreadyAcked):
            continue  # its lease ended while it trained, or the ack before this one got through
        except StoreError:
            time.sleep(0.05)  # the disk refuses: what was asked for may be done or not, and is asked for again
        except HeadraceError as error:
            with (plan.folder / "surprises").open("a") as file:
                file.write(f"the learner was told {error.code}: {error.detail}\n")
            time.sleep(0.05)


def _pulls(clients: Sequence[Client], ahead: int) -> Iterator[Sequence[Batch]]:
    """One batch after the other, each as the shards of all ranks."""
    if ahead:
        for batch in clients[0].batches("run", timeout_s=120, prefetch=ahead):
            yield [batch]
    while True:
        yield [
            client.pull("run", timeout_s=120, shard=rank, shards=len(clients)) for rank, client in enumerate(clients)
        ]


def _train(plan: Plan, points: Points, client: Client, shards: Sequence[Batch]) -> None:
    points.here("holding")
    for shard in shards:
        shard.verify()
    assert len({shard.id for shard in shards}) == 1
    time.sleep(random.uniform(0, 0.02))
    if random.random() < 0.25:
        client.nack(shards[0], "by chance")
        return
    number = int(client.run("run").version.split(".")[1]) + 1
    made = client.ack(shards[0], f"0.{number}").version
    points.here("acked")
    _replace(plan.folder / "version", made)


def _watch_requests(points: Points) -> None:
    """Some time after a request was begun, with or without its answer."""
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

_ = app, environment  # loaded before any fork, like all else

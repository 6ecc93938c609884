"""Replay at a start, after random histories."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.errors import BatchSuperseded, CorruptRecord, ServiceError
from headrace.store import log_format
from headrace.store.log_files import LogFile
from headrace.store.log_format import FrameType
from headrace.trajectory import Provenance, Version
from headrace.wire import messages
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.scheduler.commands import batches
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.batches.bodies import ServedBatch
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.settings import Settings
from tests.orchestrator.buffer.test_log import Disk, flip
from tests.orchestrator.buffer.test_projection import rows
from tests.orchestrator.scheduler.durable_values import durable_values
from tests.orchestrator.serving import record_for, submission, until, whole

FILE_BYTES = 6000
"""Size at which a file holds a few records, so that a short history has many files."""


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ServiceState(NamedTuple):
    """The whole state of a service."""

    durable: dict[str, Any]
    groups: Any
    batches: Any
    trajectories: int


def state_of(core: Scheduler, store: Store) -> ServiceState:
    groups = {(run, id): group for run, groups in store.index.groups.items() for id, group in groups.items()}
    return ServiceState(durable_values(core.state), groups, store.index.batches, store.index.trajectories)


async def read(
    data: Path, *, states: bool = True, projection: bool = True, damaged: list[None] | None = None
) -> ServiceState:
    """The state that a start restores from a data directory, optionally without control states or projection."""
    log = Log(data / "log", file_bytes=FILE_BYTES)
    if not projection:
        (data / "projection.sqlite").unlink()
    if not states:
        log.state, log.base = None, 0
    store = Store(log, SqliteProjection(data / "projection.sqlite", log.id))
    core = Scheduler(epoch=99, new_id=new_id, new_nonce=new_id)
    lost: list[None] = [] if damaged is None else damaged
    await asyncio.to_thread(replay, core, store, 0.0, damaged=lambda: lost.append(None), stopping=lambda: False)
    assert damaged is not None or not lost
    found = state_of(core, store)
    await store.close()
    return found


class LocalService:
    """A service without HTTP, and one client in all roles."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.clock = Clock()
        self.batches: list[Batch] = []
        self.held: list[messages.Assignment] = []
        self.version = 0

    async def open(self) -> None:
        self._nobody_left = asyncio.create_task(asyncio.Event().wait())
        self._directory = DataDirectory.claim(self.data)
        self.service = Service(Settings(data=self.data, log_file_bytes=FILE_BYTES), self._directory, clock=self.clock)
        await self.service.start()

    async def close(self) -> None:
        self.service.drain()
        await self.service.close()
        self._directory.close()
        self._nobody_left.cancel()
        await asyncio.gather(self._nobody_left, return_exceptions=True)

    def left(self) -> Any:
        """The client never disconnects."""
        return self._nobody_left

    @property
    def store(self) -> Store:
        assert self.service._running is not None
        return self.service._running.shell.store

    def state(self) -> ServiceState:
        return state_of(self.service.require_stored().shell.core, self.store)

    async def restart(self) -> None:
        await self.close()
        await self.open()

    async def lease(self) -> None:
        request = messages.LeaseRequest(worker="w", slots=64, free=3)
        self.held += (await self.service.lease(request, self.left)).attempts

    async def submit(self) -> None:
        submitted, self.held = self.held, []
        records = [(a, record_for(a, provenance=Provenance(worker="w"))) for a in submitted]
        await self.service.require_stored().submissions.submit("w", submission(records))

    async def pull(self) -> None:
        served = await self.service.require_stored().pulls.pull(
            "run", messages.PullRequest(learner="l", session="s", request=new_id()), self.left
        )
        if isinstance(served, ServedBatch):
            batch = Batch.parse(await whole(served), generation=served.generation, lease_s=served.lease_s)
            batch.verify()
            self.batches.append(batch)

    async def ack(self) -> None:
        if self.batches:
            batch = self.batches.pop(0)
            version = Version(0, self.version + 1)
            request = messages.AckRequest(learner="l", session="s", generation=batch.generation, version=str(version))
            try:
                await self.service.execute(
                    lambda state, now: batches.ack(state, state.run("run"), batch.id, request, now)
                )
            except BatchSuperseded:
                return
            self.version += 1

    async def nack(self) -> None:
        if self.batches:
            batch = self.batches.pop()
            request = messages.NackRequest(learner="l", session="s", generation=batch.generation, reason="why not")
            await self.service.execute(lambda state, now: batches.nack(state, state.run("run"), batch.id, request, now))

    async def project(self) -> None:
        await self.store.project()

    async def create_run(self) -> None:
        spec = {"name": "run", "environments": [{"id": "test:Echo"}], "group_size": 2, "batch_size": 4}
        spec |= {"max_staleness": 3, "attempt_lease_s": 60.0, "batch_lease_s": 200.0}
        await self.service.create_run(msgspec.json.encode(spec))

    async def recover(self, disk: Disk) -> None:
        """Let the disk work again, and the service recover."""
        disk.refuses = 0
        log = self.store.log

        async def is_well() -> bool:
            log.retry()
            return not log.failure

        await until(is_well)

    async def let_time_pass(self) -> None:
        self.clock.now += 70.0
        shell = self.service.require_stored().shell
        shell.core.tick(shell.now())
        shell.commit()
        await shell.store.log.synced()


PARTS = ("lease", "lease", "submit", "submit", "pull", "ack", "nack", "project", "restart", "let_time_pass")


async def play(service: LocalService, parts: list[tuple[str, int]], disk: Disk) -> None:
    """Carry out a history; the number of an action is the call in it at which the disk fails, 0: none."""
    before: dict[str, tuple[bytes, int]] = {}
    for part, refuses_after in parts:
        if refuses_after and part != "restart":
            disk.refuses, disk.after = errno.ENOSPC, refuses_after - 1
        with suppress(ServiceError) if refuses_after else nullcontext():
            await getattr(service, part)()
        await service.recover(disk)
        after = sealed(service.data / "log")
        assert {name: after[name] for name in before} == before, "a file was changed that another one follows"
        before = after


def sealed(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification times of all files but the last."""
    files = sorted(directory.iterdir())[:-1]
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


HISTORIES = st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from([0, 0, 0, 1, 2])), min_size=5, max_size=60)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=HISTORIES, call=st.sampled_from(["writev", "fdatasync"]))
def test_the_newest_state_and_the_log_behind_it_give_the_same_result_as_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int]], call: str
):
    path = tmp_path_factory.mktemp("history")

    async def history() -> None:
        with pytest.MonkeyPatch.context() as patch:
            service = LocalService(path / "data")
            await service.open()
            try:
                await service.create_run()
                await play(service, parts, Disk(patch, call))
                await service.store.project()
                expected, expected_rows = service.state(), rows(service.data / "projection.sqlite")
                for name in ("as killed", "without states", "without a projection"):
                    shutil.copytree(service.data, path / name)
            finally:
                await service.close()
        assert await read(path / "as killed") == expected
        assert await read(path / "without states", states=False, projection=False) == expected
        assert await read(path / "without a projection", projection=False) == expected
        for copy in ("as killed", "without states", "without a projection"):
            assert rows(path / copy / "projection.sqlite") == expected_rows

    asyncio.run(history())


@pytest.fixture
async def service(data_dir: Path) -> AsyncIterator[LocalService]:
    """A service with a history: many files, groups in all states, an open batch."""
    found = LocalService(data_dir)
    await found.open()
    await found.create_run()
    for part in (*(("lease", "submit") * 6), "pull", "ack", *(("lease", "submit") * 3), "pull", "lease"):
        await getattr(found, part)()
    await found.store.project()
    yield found
    await found.close()


async def test_a_damaged_state_costs_nothing(service: LocalService, tmp_path: Path):
    expected, expected_rows = service.state(), rows(service.data / "projection.sqlite")
    numbers = sorted(service.store.log.files.sizes())
    assert len(numbers) > 4
    for damaged in range(1, 4):
        copy = tmp_path / str(damaged)
        shutil.copytree(service.data, copy)
        for number in numbers[-damaged:]:
            damage_head(copy / "log" / f"{number:08d}.log")
        told: list[None] = []
        assert await read(copy, damaged=told) == expected
        assert len(told) == damaged
        assert rows(copy / "projection.sqlite") == expected_rows


async def test_a_state_that_cannot_be_restored_costs_nothing(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such a state was usually written by another version."""
    expected = service.state()
    real = Scheduler.restore
    for refused in (1, 2, 100):
        told: list[None] = []

        def restore(core: Scheduler, data: bytes, now: float, told: list[None] = told, refused: int = refused) -> None:
            if len(told) < refused:
                raise CorruptRecord("It is of another version.")
            real(core, data, now)

        monkeypatch.setattr(Scheduler, "restore", restore)
        shutil.copytree(service.data, tmp_path / str(refused))
        assert await read(tmp_path / str(refused), damaged=told) == expected
        assert len(told) == min(refused, len(list((service.data / "log").iterdir())))


async def test_a_log_without_its_beginning_and_without_a_state_is_refused(service: LocalService, tmp_path: Path):
    shutil.copytree(service.data / "log", tmp_path / "log")
    for file in (tmp_path / "log").iterdir():
        damage_head(file)
    await Log(tmp_path / "log", file_bytes=FILE_BYTES).close()  # the whole log gives the same result
    (tmp_path / "log" / "00000001.log").unlink()
    with pytest.raises(CorruptRecord, match="before 00000002"):
        Log(tmp_path / "log", file_bytes=FILE_BYTES)


async def test_frames_that_are_projected_already_are_not_read_again(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scanned: list[str] = []
    real = LogFile.scan

    def scan(file: LogFile, start: int = 0) -> Any:
        scanned.append(file.path.name)
        return real(file, start)

    monkeypatch.setattr(LogFile, "scan", scan)
    files = sorted(file.name for file in (service.data / "log").iterdir())
    shutil.copytree(service.data, tmp_path / "copy")
    await read(tmp_path / "copy")
    assert scanned == files[-1:]
    scanned.clear()
    await read(tmp_path / "copy", projection=False)
    assert scanned == files


async def test_a_start_whose_state_is_far_behind_begins_with_a_new_one(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = service.state()
    shutil.copytree(service.data, tmp_path / "copy")
    files = len(service.store.log.files.sizes())
    monkeypatch.setattr(Store, "state_due", True)
    assert await read(tmp_path / "copy") == expected
    assert len(list((tmp_path / "copy" / "log").iterdir())) == files + 1
    log = Log(tmp_path / "copy" / "log", file_bytes=FILE_BYTES)
    assert log.base == Location(files + 1, 0, 0).position
    await log.close()


def damage_head(file: Path) -> None:
    """Flip a bit in both copies of a file's head."""
    size = log_format.frame_bytes(FrameType.FILE_HEAD, int.from_bytes(file.read_bytes()[12:20], "little"))
    for offset in (64, size // 2 + 64):
        flip(file, offset)

"""A start: the newest control state and the log behind it, whatever happened before."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

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
from headrace_orchestrator.scheduler.queries.durable_values import durable_values
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.batches.bodies import ServedBatch
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.settings import Settings
from tests.orchestrator.buffer.test_log import Disk, flip
from tests.orchestrator.buffer.test_projection import rows
from tests.orchestrator.serving import record_for, submission, until, whole

FILE_BYTES = 6000
"""A file holds a few records: a short history has many files."""


class Clock:
    """Monotonic seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Known(NamedTuple):
    """All that a service knows."""

    durable: dict[str, Any]
    groups: Any
    batches: Any
    trajectories: int


def known(core: Scheduler, store: Store) -> Known:
    groups = {(run, id): group for run, groups in store.index.groups.items() for id, group in groups.items()}
    return Known(durable_values(core.state), groups, store.index.batches, store.index.trajectories)


async def read(data: Path, *, states: bool = True, listed: bool = True, damaged: list[None] | None = None) -> Known:
    """What a start takes from a data directory; where it is told so, without any control state, or without what is
    listed already."""
    log = Log(data / "log", file_bytes=FILE_BYTES)
    if not listed:
        (data / "projection.sqlite").unlink()
    if not states:
        log.state, log.base = None, 0
    store = Store(log, SqliteProjection(data / "projection.sqlite", log.id))
    core = Scheduler(epoch=99, new_id=new_id, new_nonce=new_id)
    lost: list[None] = [] if damaged is None else damaged
    await asyncio.to_thread(replay, core, store, 0.0, damaged=lambda: lost.append(None), stopping=lambda: False)
    assert damaged is not None or not lost
    found = known(core, store)
    await store.close()
    return found


class House:
    """A service without HTTP, and one client that plays all parts."""

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
        """The client never leaves."""
        return self._nobody_left

    @property
    def store(self) -> Store:
        assert self.service._running is not None
        return self.service._running.shell.store

    def known(self) -> Known:
        return known(self.service.require_stored().shell.core, self.store)

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
        await self.service.create_run({**spec, "max_staleness": 3, "attempt_lease_s": 60.0, "batch_lease_s": 200.0})

    async def recover(self, disk: Disk) -> None:
        """The disk takes data again, and the service goes on."""
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


async def play(house: House, parts: list[tuple[str, int]], disk: Disk) -> None:
    """A history; the number with a part says after how many calls in it the disk refuses, 0: it does not."""
    before: dict[str, tuple[bytes, int]] = {}
    for part, refuses_after in parts:
        if refuses_after and part != "restart":
            disk.refuses, disk.after = errno.ENOSPC, refuses_after - 1
        with suppress(ServiceError) if refuses_after else nullcontext():
            await getattr(house, part)()
        await house.recover(disk)
        after = sealed(house.data / "log")
        assert {name: after[name] for name in before} == before, "a file was changed that another one follows"
        before = after


def sealed(directory: Path) -> dict[str, tuple[bytes, int]]:
    """All files but the last: their content, and when they were last written."""
    files = sorted(directory.iterdir())[:-1]
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


HISTORIES = st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from([0, 0, 0, 1, 2])), min_size=5, max_size=60)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=HISTORIES, call=st.sampled_from(["writev", "fdatasync"]))
def test_the_newest_state_and_the_log_behind_it_give_the_same_as_the_whole_log(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int]], call: str
):
    path = tmp_path_factory.mktemp("history")

    async def story() -> None:
        with pytest.MonkeyPatch.context() as patch:
            house = House(path / "data")
            await house.open()
            try:
                await house.create_run()
                await play(house, parts, Disk(patch, call))
                await house.store.project()
                lived, listed = house.known(), rows(house.data / "projection.sqlite")
                for name in ("as killed", "without states", "without a projection"):
                    shutil.copytree(house.data, path / name)
            finally:
                await house.close()
        assert await read(path / "as killed") == lived
        assert await read(path / "without states", states=False, listed=False) == lived
        assert await read(path / "without a projection", listed=False) == lived
        for copy in ("as killed", "without states", "without a projection"):
            assert rows(path / copy / "projection.sqlite") == listed

    asyncio.run(story())


@pytest.fixture
async def house(data_dir: Path) -> AsyncIterator[House]:
    """One that has lived: many files, groups in all states, a batch in flight."""
    found = House(data_dir)
    await found.open()
    await found.create_run()
    for part in (*(("lease", "submit") * 6), "pull", "ack", *(("lease", "submit") * 3), "pull", "lease"):
        await getattr(found, part)()
    await found.store.project()
    yield found
    await found.close()


async def test_a_damaged_state_costs_nothing(house: House, tmp_path: Path):
    lived, listed = house.known(), rows(house.data / "projection.sqlite")
    numbers = sorted(house.store.log.files.sizes())
    assert len(numbers) > 4
    for damaged in range(1, 4):
        copy = tmp_path / str(damaged)
        shutil.copytree(house.data, copy)
        for number in numbers[-damaged:]:
            damage_head(copy / "log" / f"{number:08d}.log")
        told: list[None] = []
        assert await read(copy, damaged=told) == lived
        assert len(told) == damaged
        assert rows(copy / "projection.sqlite") == listed


async def test_a_state_that_cannot_be_taken_costs_nothing(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Written by another version, as a rule."""
    lived = house.known()
    real = Scheduler.restore
    for refused in (1, 2, 100):
        told: list[None] = []

        def restore(core: Scheduler, data: bytes, now: float, told: list[None] = told, refused: int = refused) -> None:
            if len(told) < refused:
                raise CorruptRecord("It is of another version.")
            real(core, data, now)

        monkeypatch.setattr(Scheduler, "restore", restore)
        shutil.copytree(house.data, tmp_path / str(refused))
        assert await read(tmp_path / str(refused), damaged=told) == lived
        assert len(told) == min(refused, len(list((house.data / "log").iterdir())))


async def test_a_log_without_its_beginning_and_without_a_state_is_refused(house: House, tmp_path: Path):
    shutil.copytree(house.data / "log", tmp_path / "log")
    for file in (tmp_path / "log").iterdir():
        damage_head(file)
    await Log(tmp_path / "log", file_bytes=FILE_BYTES).close()  # all of it gives the same
    (tmp_path / "log" / "00000001.log").unlink()
    with pytest.raises(CorruptRecord, match="before 00000002"):
        Log(tmp_path / "log", file_bytes=FILE_BYTES)


async def test_what_is_listed_already_is_not_read_again(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scanned: list[str] = []
    real = LogFile.scan

    def scan(file: LogFile, start: int = 0) -> Any:
        scanned.append(file.path.name)
        return real(file, start)

    monkeypatch.setattr(LogFile, "scan", scan)
    files = sorted(file.name for file in (house.data / "log").iterdir())
    shutil.copytree(house.data, tmp_path / "copy")
    await read(tmp_path / "copy")
    assert scanned == files[-1:]
    scanned.clear()
    await read(tmp_path / "copy", listed=False)
    assert scanned == files


async def test_a_start_whose_state_is_far_behind_begins_with_a_new_one(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lived = house.known()
    shutil.copytree(house.data, tmp_path / "copy")
    files = len(house.store.log.files.sizes())
    monkeypatch.setattr(Store, "state_due", True)
    assert await read(tmp_path / "copy") == lived
    assert len(list((tmp_path / "copy" / "log").iterdir())) == files + 1
    log = Log(tmp_path / "copy" / "log", file_bytes=FILE_BYTES)
    assert log.base == Location(files + 1, 0, 0).position
    await log.close()


def damage_head(file: Path) -> None:
    """Flip a bit in both copies of a file's head."""
    size = log_format.frame_bytes(FrameType.FILE_HEAD, int.from_bytes(file.read_bytes()[12:20], "little"))
    for offset in (64, size // 2 + 64):
        flip(file, offset)

"""A small log, damaged everywhere: damage is always found, costs the damaged record only, and the rest is served."""

from __future__ import annotations

import asyncio
import io
import os
import random
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headrace
from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.errors import CorruptRecord, StoreError
from headrace.store.log_format import Frame, FrameType, scan
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service.fsck.findings import FsckFinding
from headrace_orchestrator.service.fsck.fsck import LogCheck, check
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.store import Store
from tests.orchestrator.buffer.test_projection import rows
from tests.orchestrator.scheduler.durable_values import durable_values
from tests.orchestrator.serving import orchestrator, record_for, submission

TWICE = (FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.FOOTER)


class IntactData(NamedTuple):
    """An intact directory with an acked and a leased batch."""

    path: Path
    acked: Batch
    leased: bytes


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> IntactData:
    """A log of one file."""
    return asyncio.run(make(tmp_path_factory.mktemp("one") / "data"))


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> IntactData:
    """A log of several files: sealed ones with footers, heads with the control state."""
    return asyncio.run(make(tmp_path_factory.mktemp("many") / "data", log_file_bytes=2 << 10))


async def make(path: Path, **settings: Any) -> IntactData:
    async with orchestrator(path, **settings) as api:
        await api.create_run(group_size=1, batch_size=1, max_staleness=3)
        for _ in range(3):
            (attempt,) = await api.lease(free=1)
            await api.submit(submission([(attempt, record_for(attempt, messages=[]))]))
        acked = await api.pull()
        assert isinstance(acked, Batch)
        await api.ack(acked, "0.1")
        leased, _ = await api.pull_raw(request="leased")
    return IntactData(path, acked, leased)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def fresh(intact: IntactData, copied: Path) -> Path:
    """A copy to damage."""
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(intact.path, copied)
    return copied


def frames_of(file: Path) -> list[Frame]:
    with file.open("rb") as stream:
        return [item for item in scan(stream) if isinstance(item, Frame)]


def log_files(data: Path) -> list[Path]:
    return sorted((data / "log").glob("*.log"))


def findings_in_log(data: Path) -> list[FsckFinding]:
    reading = LogCheck(data, None, lambda done, total: None)
    reading.run()
    return reading.findings


def flipped(file: Path, positions: Iterator[int] | range, mask: int = 0x40) -> Iterator[int]:
    """Flip one byte after the other; each is restored before the next one."""
    intact = file.read_bytes()
    with file.open("r+b", buffering=0) as stream:
        for position in positions:
            stream.seek(position)
            stream.write(bytes([intact[position] ^ mask]))
            yield position
            stream.seek(position)
            stream.write(intact[position : position + 1])


def one_flipped(file: Path, position: int) -> None:
    """Flip one byte."""
    next(flipped(file, iter([position])))


class Started(NamedTuple):
    """A core and a store that read the log, and the number of records that they skipped."""

    core: Scheduler
    store: Store
    damaged: int


async def start(data: Path, *, with_projection: bool = False) -> Started:
    """Read a log as a start does, without a server; without the stored projection by default."""
    if not with_projection:
        for file in data.glob("projection.sqlite*"):
            file.unlink()
    log = Log(data / "log", file_bytes=1 << 20)
    store = Store(log, SqliteProjection(data / "projection.sqlite", log.id))
    core = Scheduler(epoch=9, new_id=new_id, new_nonce=lambda: secrets.token_hex(8))
    passed_over: list[None] = []
    replay(core, store, 0.0, damaged=lambda: passed_over.append(None), stopping=lambda: False)
    return Started(core, store, len(passed_over))


def test_every_flipped_byte_is_found_and_only_its_record_is_named(one_file: IntactData, copied: Path):
    fresh(one_file, copied)
    (file,) = log_files(copied)
    frames = frames_of(file)
    assert findings_in_log(copied) == []
    ends = {frame.type for frame in frames}
    assert ends == {FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.TRAJECTORY, FrameType.BATCH}
    for position in flipped(file, range(file.stat().st_size)):
        (hit,) = [frame for frame in frames if frame.offset <= position < frame.offset + frame.size]
        (finding,) = findings_in_log(copied)
        assert (finding.file, finding.offset, finding.size_bytes) == (f"log/{file.name}", hit.offset, hit.size), (
            position
        )
        assert not (finding.lost and hit.type in TWICE), position
    assert findings_in_log(copied) == []


def test_every_flipped_byte_of_heads_and_footers_is_found_and_loses_nothing(many_files: IntactData, copied: Path):
    fresh(many_files, copied)
    files = log_files(copied)
    assert len(files) >= 3
    kinds = set()
    for file in files[1:3]:
        for frame in frames_of(file):
            if frame.type not in (FrameType.FILE_HEAD, FrameType.FOOTER):
                continue
            kinds.add(frame.type)
            # Every byte of the headers, and of the payloads every third.
            half = frame.size // 2
            headers = [range(frame.offset + copy, frame.offset + copy + 64) for copy in (0, half)]
            payload = range(frame.offset, frame.offset + frame.size, 3)
            for position in flipped(file, iter(sorted({*headers[0], *headers[1], *payload}))):
                (finding,) = findings_in_log(copied)
                assert (finding.kind, finding.offset, finding.lost) == ("copy", frame.offset, False), position
    assert kinds == {FrameType.FILE_HEAD, FrameType.FOOTER}


def test_a_log_that_is_cut_anywhere_loses_only_records_behind_the_cut(one_file: IntactData, copied: Path):
    fresh(one_file, copied)
    (file,) = log_files(copied)
    frames = frames_of(file)
    for length in reversed(range(file.stat().st_size)):
        with file.open("r+b", buffering=0) as stream:
            stream.truncate(length)
        reading = LogCheck(copied, None, lambda done, total: None)
        reading.run()
        left = [frame for frame in frames if frame.offset + frame.size <= length]
        assert reading.findings == []
        assert sum(reading.frames.values()) == len(left)
        assert reading.unfinished_bytes == length - (left[-1].offset + left[-1].size if left else 0)


def test_records_that_were_cut_off_are_named_by_the_projection(one_file: IntactData, copied: Path):
    fresh(one_file, copied)
    (file,) = log_files(copied)
    for frame in frames_of(file)[1:]:
        with file.open("r+b") as stream:
            stream.truncate(frame.offset + 1)
        found = [finding for finding in check(copied).findings if finding.lost]
        assert [(finding.kind, finding.offset) for finding in found] == [("file", frame.offset)]
        assert (frame.type in (FrameType.TRAJECTORY, FrameType.BATCH)) <= bool(found[0].names)
        fresh(one_file, copied)


@pytest.mark.parametrize("name", ["one_file", "many_files"])
async def test_a_start_after_any_flipped_byte_decides_as_before_and_serves_the_rest(
    name: str, copied: Path, request: pytest.FixtureRequest
):
    intact: IntactData = request.getfixturevalue(name)
    draw = random.Random(name)
    fresh(intact, copied)
    before = await start(copied)
    state, places = durable_values(before.core.state), dict(_records(intact.path))
    assert before.damaged == 0
    await before.store.close()
    bodies = {id: body for id, (_, body) in places.items()}
    for file in log_files(intact.path):
        for frame in frames_of(file):
            # One random byte in each 256, so that headers, payloads and both copies are covered.
            for block in range(frame.offset, frame.offset + frame.size, 256):
                fresh(intact, copied)
                damaged = copied / "log" / file.name
                position = draw.randrange(block, min(block + 256, frame.offset + frame.size))
                one_flipped(damaged, position)
                found = await start(copied)
                for id, (location, _) in places.items():
                    if location != Location(int(file.stem), frame.offset, location.length):
                        assert found.store.log.read(location) == bodies[id], (position, id)
                if frame.type in TWICE:
                    assert (found.damaged, durable_values(found.core.state)) == (0, state), (file.name, position)
                assert durable_values(found.core.state)["runs"]["run"]["versions"] == state["runs"]["run"]["versions"]
                await found.store.close()


def _records(data: Path) -> Iterator[tuple[str, tuple[Location, bytes]]]:
    """Every trajectory and batch head, with its location and its bytes."""
    for file in log_files(data):
        for frame in frames_of(file):
            if frame.type in (FrameType.TRAJECTORY, FrameType.BATCH):
                location = Location(int(file.stem), frame.offset, len(frame.payload))
                yield f"{file.stem}-{frame.offset}", (location, frame.payload)


@pytest.mark.parametrize("kind", [FrameType.FILE_HEAD, FrameType.FOOTER])
async def test_a_lost_head_or_footer_changes_no_decision(many_files: IntactData, copied: Path, kind: FrameType):
    before = await start(fresh(many_files, copied))
    await before.store.close()
    for file in log_files(many_files.path)[1:]:
        for frame in frames_of(file):
            if frame.type is kind:
                fresh(many_files, copied)
                for copy in (0, frame.size // 2):
                    one_flipped(copied / "log" / file.name, frame.offset + copy + 64)
                found = await start(copied)
                assert durable_values(found.core.state) == durable_values(before.core.state), file.name
                await found.store.close()


async def test_an_ack_whose_batch_is_lost_does_not_come_undone(one_file: IntactData, copied: Path):
    (file,) = log_files(fresh(one_file, copied))
    head = next(frame for frame in frames_of(file) if frame.type is FrameType.BATCH)
    one_flipped(file, head.offset + 100)
    async with orchestrator(copied) as api:
        assert (await api.ask("GET", "/v1/runs/run"))["version"] == "0.1"
        served: list[str] = []
        while isinstance(batch := await api.pull(session="two", request=f"request-{len(served)}"), Batch):
            served += batch.manifest.trajectories
            await api.ack(batch, f"0.{1 + len(served)}", session="two")
        assert len(served) == 2
        assert not set(served) & set(one_file.acked.manifest.trajectories)


async def test_a_frozen_batch_with_a_lost_record_is_not_served_again_and_other_records_are(
    one_file: IntactData, copied: Path
):
    (file,) = log_files(fresh(one_file, copied))
    leased = Batch.parse(one_file.leased)
    member = [frame for frame in frames_of(file) if frame.type is FrameType.TRAJECTORY][1]
    one_flipped(file, member.offset + 100)
    async with orchestrator(copied) as api:
        batch = await api.pull(request="leased")
        assert isinstance(batch, Batch)
        assert batch.id != leased.id
        assert not set(batch.manifest.trajectories) & set(leased.manifest.trajectories)
        await api.ack(batch, "0.2")
        await api.play(free=4)  # includes the episode whose record was lost
        assert isinstance(await api.pull(request="more"), Batch)


@pytest.mark.parametrize("kind", list(FrameType))
async def test_a_service_starts_on_a_damaged_log_and_no_ack_comes_undone(
    many_files: IntactData, copied: Path, kind: FrameType
):
    fresh(many_files, copied)
    file, frame = [(file, frame) for file in log_files(copied) for frame in frames_of(file) if frame.type is kind][-1]
    one_flipped(file, frame.offset + 64)
    async with orchestrator(copied) as api:
        refused = await api.ack(many_files.acked, "0.7", status=409)
        assert refused["code"] == "batch-already-acked"
        if kind is FrameType.BATCH:
            assert file.name in str(check(copied).findings[0].file)
        elif kind is not FrameType.TRAJECTORY:
            again, _ = await api.pull_raw(request="leased")
            assert again == many_files.leased
        assert (await api.ask("GET", "/v1/runs/run"))["version"] == "0.1"
        assert len((await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]) == 3
        await api.play(free=1)


async def test_a_flipped_byte_of_the_projection_is_found_or_changes_nothing(one_file: IntactData, copied: Path):
    draw = random.Random(0)
    fresh(one_file, copied)
    file = copied / "projection.sqlite"
    lived, before = rows(file), await start(copied, with_projection=True)
    page = before.store.projection.page("run", {}, 100, None, now_ms=0)
    await before.store.close()
    intact = file.read_bytes()
    used = [position for position, byte in enumerate(intact) if byte]
    named = noticed = 0
    for position in draw.sample(used, 48):
        fresh(one_file, copied)
        next(flipped(file, iter([position]), mask=1 << draw.randrange(8)))
        found = check(copied).findings
        assert {finding.kind for finding in found} <= {"projection"}
        assert not any(finding.lost for finding in found)
        if not found:
            assert rows(file) == lived, position
        named += bool(found)
        # A start makes the same decisions in any case.
        started = await start(copied, with_projection=True)
        assert durable_values(started.core.state) == durable_values(before.core.state)
        try:
            if started.store.projection.page("run", {}, 100, None, now_ms=0) != page:
                started.store.projection.check()  # an index lost a row: the background check finds it
                raise AssertionError(position)
        except StoreError:
            noticed += 1
        await started.store.close()
        again = await start(copied, with_projection=True)
        assert again.store.projection.page("run", {}, 100, None, now_ms=0) == page, position
        await again.store.close()
    assert named > 5
    assert noticed > 1  # a start reads the last row, and rebuilds the projection


@pytest.mark.parametrize("harm", ["a file", "an end", "the last file"])
async def test_missing_parts_of_the_log_are_named_at_a_start_and_by_readers(
    data_dir: Path, capfd: pytest.CaptureFixture[str], harm: str
):
    async with orchestrator(data_dir, log_file_bytes=20_000) as api:
        await api.create_run(group_size=1, batch_size=64)
        for _ in range(8):
            await api.play(free=8)
    files = sorted((data_dir / "log").glob("*.log"))
    assert len(files) > 3
    if harm == "a file":
        files[1].unlink()
    elif harm == "an end":
        # Cut between two frames: only the head of the next file shows it.
        last = list(scan(io.BytesIO(files[-2].read_bytes())))[-2]
        os.truncate(files[-2], last.offset)
        (data_dir / "projection.sqlite").unlink()  # so that the start reads it
    else:
        files[-1].unlink()
    told = {"a file": "00000002.log after it is missing", "an end": "bytes before its end"}
    capfd.readouterr()
    async with orchestrator(data_dir) as api:
        metrics = await (await api.session.get("/metrics")).text()
    assert "headrace_log_damaged_records_total 1.0" in metrics
    assert told.get(harm, "the log lost its end") in capfd.readouterr().out
    if harm in told:
        reader = headrace.open(data_dir)
        assert list(reader.trajectories())
        assert told[harm] in reader.damaged[0].problem
        with pytest.raises(CorruptRecord):
            list(headrace.open(data_dir, strict=True).trajectories())

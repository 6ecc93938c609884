"""The projection: derived from the log, off the hot path."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.batch import Batch
from headrace.errors import StoreError
from headrace.store import log_files
from headrace.trajectory import Failure, Version
from headrace.wire import messages
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, ProjectedBatch, ProjectedTrajectory
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.scheduler.events import BatchAcked
from headrace_orchestrator.service.storage.record_events import event_of
from tests.builders import make_failed, make_trajectory
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.serving import Api, orchestrator


def rows(file: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Content of all tables but the cursor."""
    connection = sqlite3.connect(file)
    try:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY position").fetchall()
            for table in ("trajectories", "batches", "batch_members")
        }
    finally:
        connection.close()


async def a_little_history(api: Api) -> None:
    await api.create_run()
    await api.play(free=8)
    batch = await api.pull()
    await api.ack(batch, "0.1")
    await api.pull()
    attempts = await api.lease(free=2)
    assert attempts
    await api.ask("POST", "/v1/runs/run/close")


async def test_a_deleted_projection_is_rebuilt_with_the_same_content(data_dir: Path):
    file = data_dir / "projection.sqlite"
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    before = rows(file)
    assert len(before["trajectories"]) >= 8
    assert sorted(row[-2] for row in before["batches"])[0] == "acked"
    file.unlink()
    async with orchestrator(data_dir):
        pass
    assert rows(file) == before


@pytest.mark.parametrize("damage", [b"this is no database" * 100, b""])
async def test_a_damaged_projection_is_rebuilt(data_dir: Path, damage: bytes):
    file = data_dir / "projection.sqlite"
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    before = rows(file)
    file.write_bytes(damage)
    async with orchestrator(data_dir):
        pass
    assert rows(file) == before


async def test_a_projection_of_another_log_is_rebuilt(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    (tmp_path / "other").mkdir()
    (data_dir / "projection.sqlite").rename(tmp_path / "other" / "projection.sqlite")
    async with orchestrator(tmp_path / "other") as api:
        await api.create_run()
        assert (await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"] == []


def log_id(data: Path) -> str:
    (file,) = log_files.newest_first(data / "log", [1])
    assert file.head is not None
    return file.head.log


async def test_it_never_runs_ahead_of_the_disk(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
        await api.ask("GET", "/v1/runs/run/trajectories")
        cursor = SqliteProjection(data_dir / "projection.sqlite", log_id(data_dir))
        size = sum(file.stat().st_size for file in (data_dir / "log").glob("*.log"))
        assert 0 < Location.from_position(cursor.cursor, 0).offset <= size
        cursor.close()


async def test_a_listing_is_read_by_pages_and_no_reader_keeps_the_database_open(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    for number in range(30):
        projection.write([row(number + 1)], number + 1)
    page, before = projection.page("run", {}, 10, None, now_ms=0)
    assert [line.episode for line in page] == [f"episode-{number}" for number in range(30, 20, -1)]
    projection.write([row(31)], 31)
    page, before = projection.page("run", {}, 10, before, now_ms=0)
    assert [line.episode for line in page] == [f"episode-{number}" for number in range(20, 10, -1)]
    page, before = projection.page("run", {}, 10, before, now_ms=0)
    assert before is None
    assert [line.episode for line in page] == [f"episode-{number}" for number in range(10, 0, -1)]
    projection.close()


def test_listings_are_narrowed_by_status_environment_and_evaluation(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    broken = make_failed(number=2, failure=Failure(layer="tool", kind="timeout", message="Too slow."))
    projection.write([row(1), row_of(broken, 2)], 2)
    page, _ = projection.page("run", {"status": "failed"}, 10, None, now_ms=0)
    assert [(line.id, line.failure, line.reward) for line in page] == [(broken.id, broken.failure, None)]
    assert len(projection.page("run", {"environment": "test:Echo"}, 10, None, now_ms=0)[0]) == 2
    assert projection.page("run", {"evaluation": "none"}, 10, None, now_ms=0)[0] == []
    assert projection.page("another", {}, 10, None, now_ms=0)[0] == []
    projection.close()


def test_batches_are_open_until_they_are_acked_or_dissolved(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    projection.write([batch("b", "run", ["g"], Location(1, 64, 10))], 1)
    assert [row[-2:] for row in rows(tmp_path / "p.sqlite")["batches"]] == [("open", "")]
    acked = BatchAcked(run="run", batch="b", generation=1, version=Version(0, 2))
    projection.write([LocatedEntry(acked, Location(1, 128, 10))], 2)
    assert [row[-2:] for row in rows(tmp_path / "p.sqlite")["batches"]] == [("acked", "0.2")]
    projection.close()


def test_the_batch_of_a_group_is_the_last_that_it_was_frozen_into(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    projection.write([batch("b1", "run", ["g"], Location(1, 64, 10))], 1)
    projection.write([batch("b2", "other", ["g"], Location(1, 128, 10))], 1)
    projection.write([batch("b3", "run", ["g"], Location(2, 64, 20))], 2)
    assert projection.batch_of("run", "g") == Location(2, 64, 20)
    assert projection.batch_of("run", "another") is None
    projection.close()


def test_records_that_share_an_id_are_all_listed(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    twin = make_trajectory(number=2, id=make_trajectory(number=1).id)
    projection.write([row(1), row_of(twin, 2), row_of(twin, 2)], 2)
    assert [line.episode for line in projection.page("run", {}, 10, None, now_ms=0)[0]] == ["episode-2", "episode-1"]
    projection.close()


def test_an_id_that_sorts_behind_all_stored_ids_is_known_to_be_new_without_a_lookup(tmp_path: Path):
    early, middle, late = (make_trajectory(number=number).id for number in (1, 2, 3))
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    projection.write([row(2)], 1)
    assert not looked_up_for(projection, late)
    assert looked_up_for(projection, early)
    assert projection.episodes_of([early, middle, late]) == {middle: "episode-2"}
    projection.write([row(3), row(1)], 2)
    assert projection.episodes_of([late, early]) == {late: "episode-3", early: "episode-1"}
    projection.close()


def test_ids_from_before_a_restart_are_found(tmp_path: Path):
    early, late = (make_trajectory(number=number).id for number in (1, 2))
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    projection.write([row(2), row(1)], 1)
    projection.close()
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    assert projection.episodes_of([early, late]) == {early: "episode-1", late: "episode-2"}
    projection.reset()
    assert projection.episodes_of([early, late]) == {}
    projection.close()


def test_a_damaged_last_id_does_not_make_stored_ids_look_new(tmp_path: Path):
    file, ids = tmp_path / "p.sqlite", [make_trajectory(number=number).id for number in (1, 2)]
    projection = SqliteProjection(file, "log")
    projection.write([row(1), row(2)], 5)
    projection.close()
    whole, rebuilds = file.read_bytes(), 0
    for match in re.finditer(re.escape(ids[1].encode()), whole):  # in the row and in the index
        file.write_bytes(whole)
        flip(file, match.end() - 1)
        projection = SqliteProjection(file, "log")
        is_rebuilt = projection.cursor == 0
        assert is_rebuilt or looked_up_for(projection, ids[1])
        rebuilds += is_rebuilt
        projection.close()
    assert rebuilds == 1


def looked_up_for(projection: SqliteProjection, id: str) -> list[str]:
    """The statements that a lookup of an id executes."""
    statements: list[str] = []
    projection._lookups.set_trace_callback(statements.append)
    projection.episodes_of([id])
    projection._lookups.set_trace_callback(None)
    return statements


async def test_a_projection_of_another_log_is_rebuilt_however_long_that_log_is(data_dir: Path, tmp_path: Path):
    async with orchestrator(tmp_path / "shorter") as api:
        await api.create_run(name="other")
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    before = rows(data_dir / "projection.sqlite")
    (tmp_path / "shorter" / "projection.sqlite").replace(data_dir / "projection.sqlite")
    async with orchestrator(data_dir):
        pass
    assert rows(data_dir / "projection.sqlite") == before


def test_a_failed_write_changes_nothing_and_its_error_has_advice(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    with pytest.raises(StoreError, match="delete the file"):
        projection.write([row(1), batch("b", "run", [], Location(1, 64, 1 << 64))], 5)
    assert projection.find(make_trajectory(number=1).id) is None
    assert projection.cursor == 0
    projection.close()


async def test_writing_is_off_the_hot_path(tmp_path: Path):
    projection = SqliteProjection(tmp_path / "p.sqlite", "log")
    writing = asyncio.to_thread(projection.write, [row(number) for number in range(1, 2000)], 1)
    await asyncio.gather(writing, asyncio.sleep(0))
    assert len(projection.page("run", {}, 5000, None, now_ms=0)[0]) == 1999
    projection.close()


def row(number: int) -> LocatedEntry:
    return row_of(make_trajectory(number=number), number)


def row_of(trajectory: Any, number: int) -> LocatedEntry:
    listed = ProjectedTrajectory(event_of(trajectory, 640), trajectory.stop_reason, trajectory.provenance, ())
    return LocatedEntry(listed, Location(1, number * 64, 640))


def batch(id: str, run: str, groups: list[str], head: Location) -> LocatedEntry:
    return LocatedEntry(ProjectedBatch(id, run, "0.1", tuple(groups)), head)


async def test_a_flipped_byte_in_a_listed_row_is_noticed_and_the_next_start_rebuilds_the_projection(data_dir: Path):
    file = data_dir / "projection.sqlite"
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    before = rows(file)
    # The first row, which is the last in its page: the last row is read at the start.
    file.write_bytes(b"finishdeterminated".join(file.read_bytes().rsplit(b"finishedterminated", 1)))
    async with orchestrator(data_dir) as api:
        problem = await api.ask("GET", "/v1/runs/run/trajectories", status=507)
        assert "damaged" in problem["detail"]
        assert "Restart" in problem["hint"]
        assert isinstance(await api.pull(), (Batch, messages.EmptyReply))
    async with orchestrator(data_dir) as api:
        assert len((await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]) == len(before["trajectories"])
    assert rows(file) == before


async def test_changed_tables_are_rebuilt(data_dir: Path):
    file = data_dir / "projection.sqlite"
    async with orchestrator(data_dir) as api:
        await a_little_history(api)
    before, whole = rows(file), file.read_bytes()
    for damage in (b"positiom INTEGER PRIMARY", b"p\xceition INTEGER PRIMARY", b"position \xffNTEGER PRIMARY"):
        file.write_bytes(whole.replace(b"position INTEGER PRIMARY", damage, 1))
        async with orchestrator(data_dir):
            pass
        assert rows(file) == before


def test_no_asset_is_deleted_because_of_a_damaged_projection(tmp_path: Path):
    file = tmp_path / "p.sqlite"
    projection = SqliteProjection(file, "log")
    names = [f"{number:064x}" for number in range(1, 4)]
    trajectory = make_trajectory()
    listed = ProjectedTrajectory(event_of(trajectory, 640), trajectory.stop_reason, trajectory.provenance, names)
    projection.write([LocatedEntry(listed, Location(1, 64, 640))], 1)
    projection.check()
    projection.close()
    flip(file, file.read_bytes().index(bytes.fromhex(names[1])) + 3)
    projection = SqliteProjection(file, "log")
    with pytest.raises(StoreError, match="damaged"):
        projection.check()
    assert projection.cursor == 0
    projection.close()

"""``headrace.open``: a data directory read without a service."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.batch.batch import Batch
from headrace.batch.body import RowAdvantages
from headrace.errors import CorruptRecord, InvalidRequest, MissingExtra, SetupError, UnknownBatch, UnknownTrajectory
from headrace.trajectory import Version
from headrace.wire import codec
from headrace_orchestrator.scheduler import events
from tests.builders import make_segment
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.serving import Api, orchestrator, record_for, submission


async def a_history(api: Api) -> tuple[Batch, Batch]:
    """Two runs, with an acked and an open batch."""
    await api.create_run(seed=3)
    await api.create_run(name="other", environments=[{"id": "test:Other"}], group_size=1, batch_size=1)
    await api.play(free=8)
    acked = await api.pull()
    assert isinstance(acked, Batch)
    await api.ack(acked, "0.1")
    await api.play(free=8)
    opened = await api.pull()
    assert isinstance(opened, Batch)
    await api.ask("POST", "/v1/runs/other/close")
    return acked, opened


def listing(path: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file."""
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(path.rglob("*"))}


async def test_trajectories_batches_and_runs_are_read_as_they_were_stored(data_dir: Path):
    async with orchestrator(data_dir) as api:
        acked, opened = await a_history(api)
    data = headrace.open(data_dir)
    stored = {trajectory.id: trajectory for trajectory in data.trajectories()}
    assert len(stored) >= 12
    batches = list(data.batches())
    assert [(batch.id, batch.state, batch.made) for batch in batches] == [
        (acked.id, "acked", Version(0, 1)),
        (opened.id, "open", None),
    ]
    for batch, pulled in zip(batches, (acked, opened), strict=True):
        loaded = batch.load()
        loaded.verify()
        assert loaded.manifest == pulled.manifest
        assert bytes(loaded.records) == bytes(pulled.records)
        for trajectory in pulled.trajectories:
            assert codec.encode(stored[trajectory.id]) == codec.encode(trajectory)
            assert data.record(trajectory.id) == codec.encode(trajectory)
    runs = {run.name: run for run in data.runs()}
    assert runs["run"].spec is not None
    assert runs["run"].spec["seed"] == 3
    assert (runs["run"].closed, runs["other"].closed) == (False, True)
    assert runs["run"].version == Version(0, 1)
    assert (runs["run"].batches, runs["other"].batches) == (2, 0)
    assert sum(run.trajectories for run in runs.values()) == len(stored)
    assert data.damaged == []


async def test_a_stored_batch_has_the_advantages_of_its_rows(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(estimator={"name": "grpo", "eps": 0.0})
        attempts = await api.lease(free=4)
        rewarded = ((a, record_for(a, segments=[make_segment(rewards=[float(a.member)])])) for a in attempts)
        await api.submit(submission(rewarded))
        pulled = await api.pull()
        assert isinstance(pulled, Batch)
    batch = headrace.open(data_dir).batch(pulled.id)
    for row in pulled.rows:
        (values,) = batch.advantages(row.trajectory.id)
        assert isinstance(values, RowAdvantages)
        assert values.advantages is not None
        assert values.advantages.tolist() == row.advantages.tolist()
    assert batch.advantages("another") == []


async def test_only_the_log_is_read_and_nothing_is_written(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await a_history(api)
    for file in data_dir.iterdir():
        if file.name not in ("log", "assets"):
            file.unlink()
    before = listing(data_dir)
    os.chmod(data_dir, 0o555)
    try:
        data = headrace.open(data_dir)
        assert list(data.trajectories())
        assert [batch.load().manifest for batch in data.batches()]
        assert data.runs()
    finally:
        os.chmod(data_dir, 0o755)
    assert listing(data_dir) == before


async def test_a_live_directory_is_read_while_the_service_runs(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=16 << 10) as api:
        await api.create_run(group_size=1, batch_size=64)
        first = {attempt.episode for attempt in await api.play(free=8)}
        reading = headrace.open(data_dir).trajectories()
        episodes = {next(reading).episode}
        for _ in range(4):
            await api.play(free=8)
        episodes |= {trajectory.episode for trajectory in reading}
        assert first <= episodes
        assert len({trajectory.episode for trajectory in headrace.open(data_dir).trajectories()}) == 40


async def test_a_running_append_is_omitted_without_reporting_damage(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
    whole = {trajectory.id for trajectory in headrace.open(data_dir).trajectories()}
    file = last_file(data_dir)
    with file.open("ab") as stream:
        stream.write(file.read_bytes()[: 64 + 10])
    data = headrace.open(data_dir, strict=True)
    assert {trajectory.id for trajectory in data.trajectories()} == whole
    assert data.damaged == []


async def test_a_file_that_the_service_deletes_during_the_reading_is_omitted(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=16 << 10) as api:
        await api.create_run(group_size=1, batch_size=64)
        for _ in range(10):
            await api.play(free=8)
    data = headrace.open(data_dir, strict=True)
    reading = data.trajectories()
    episodes = [next(reading).episode]
    *_, deleted, _ = sorted((data_dir / "log").glob("*.log"))
    deleted.unlink()
    episodes += [trajectory.episode for trajectory in reading]
    assert 1 < len(episodes) < 80
    assert data.damaged == []


async def test_a_damaged_record_is_listed_and_skipped_and_a_strict_reader_raises(data_dir: Path):
    async with orchestrator(data_dir) as api:
        acked, opened = await a_history(api)
    file = last_file(data_dir)
    all_ids = [trajectory.id for trajectory in headrace.open(data_dir).trajectories()]
    lost = acked.trajectories[0].id
    place = file.read_bytes().index(codec.encode(acked.trajectories[0]))
    flip(file, place + 30)

    data = headrace.open(data_dir)
    assert [trajectory.id for trajectory in data.trajectories()] == [id for id in all_ids if id != lost]
    assert [(damage.file, damage.offset) for damage in data.damaged] == [(file.name, place - 64)]
    with pytest.raises(UnknownTrajectory, match=lost):
        data.trajectory(lost)
    with pytest.raises(UnknownTrajectory, match=lost):
        data.batch(acked.id).load()
    data.batch(opened.id).load().verify()
    assert len(data.damaged) == 1

    with pytest.raises(CorruptRecord, match=f"offset {place - 64} of {file.name}"):
        list(headrace.open(data_dir, strict=True).trajectories())


async def test_trajectories_are_filtered_by_run_environment_status_and_versions(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=1)
        for n in range(3):
            (attempt,) = await api.lease(free=1)
            await api.submit(submission([(attempt, record_for(attempt, version=Version(0, n)))]))
            await api.ack(await api.pull(), f"0.{n + 1}")
        await api.create_run(name="other", environments=[{"id": "test:Other"}])
        await api.play(free=4)
    data = headrace.open(data_dir)

    def count(**filters) -> int:
        return sum(1 for _ in data.trajectories(**filters))

    everything = count()
    assert count(run="other") + count(run="run") == everything
    assert count(environment="test:Other") == count(run="other") > 0
    assert count(status="finished") == everything
    assert count(status="failed") == count(run="none") == count(evaluation="none") == 0
    assert count(evaluation="") == everything
    assert count(run="run", low=Version(0, 1), high=Version(0, 1)) == 1
    assert count(run="run", low=Version(0, 1)) == 2
    assert count(run="run", high=Version(0, 0)) == count(run="run") - 2


async def test_arrays_are_read_only_views_of_the_record(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=1)
    trajectory = next(headrace.open(data_dir).trajectories())
    for array in (trajectory.segments[0].token_ids, trajectory.segments[0].logprobs, trajectory.segments[0].sampled):
        assert not array.flags.owndata
        assert not array.flags.writeable


async def test_progress_counts_the_bytes_of_the_log(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await a_history(api)
    size = last_file(data_dir).stat().st_size
    reports: list[tuple[int, int]] = []
    list(headrace.open(data_dir, on_progress=lambda done, total: reports.append((done, total))).trajectories())
    assert reports == sorted(reports)
    assert reports[-1] == (size, size)


async def test_missing_directories_records_and_extras_raise_their_errors(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SetupError, match="not a data directory"):
        headrace.open(tmp_path / "nothing")
    async with orchestrator(data_dir):
        pass
    data = headrace.open(data_dir)
    with pytest.raises(UnknownTrajectory):
        data.trajectory("another")
    with pytest.raises(UnknownBatch):
        data.batch("another")
    assert data.runs() == []
    headrace.store.log_format._checksum.cache_clear()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtra, match=r"headrace\[offline\]"):
        headrace.open(data_dir)


def test_the_events_that_the_catalog_reads_have_the_names_of_the_schedulers_classes():
    fields = {
        "RunCreated": ("run", "spec"),
        "RunClosed": ("run",),
        "VersionAnnounced": ("run", "version"),
        "BatchAcked": ("run", "batch", "version"),
        "BatchDissolved": ("run", "batch"),
    }
    for name, expected in fields.items():
        assert set(expected) <= set(getattr(events, name).__struct_fields__)


def last_file(data_dir: Path) -> Path:
    return max((data_dir / "log").glob("*.log"))


def test_a_filter_that_nothing_can_match_is_refused(tmp_path: Path):
    (tmp_path / "log").mkdir()
    data = headrace.open(tmp_path)
    wrong: list[dict[str, Any]] = [{"status": "done"}, {"tags": "image"}, {"low": "new"}]
    for arguments in wrong:
        with pytest.raises(InvalidRequest, match=next(iter(arguments))):
            data.trajectories(**arguments)
    with pytest.raises(InvalidRequest, match="open, acked, dissolved"):
        data.batches(state="done")  # type: ignore[arg-type]
    assert list(data.trajectories(low="0.1", high=Version(0, 2))) == []

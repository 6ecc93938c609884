"""Backups: taken from a live service, and restored."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

import headrace
from headrace.batch.batch import Batch
from headrace.errors import CorruptRecord, InvalidRequest, SetupError, StoreError
from headrace.trajectory import Provenance
from headrace_orchestrator.buffer.backup import backup as copies
from headrace_orchestrator.buffer.backup.backup import back_up, read_manifest
from headrace_orchestrator.buffer.backup.restore import RestoreReport, restore
from headrace_orchestrator.buffer.data_directory import DataDirectory, last_epoch
from headrace_orchestrator.cli.backup import backup
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.service.test_restart import stored_episodes
from tests.orchestrator.serving import Api, Process, orchestrator, record_for, submission, until

NOW_S = 1_800_000_000
SMALL_FILE_BYTES = 8 << 10


def copy(data: Path, destination: Path) -> copies.BackupReport:
    return back_up(data, destination, now_ms=NOW_S * 1000)


def restore_into(backup: Path, data: Path) -> RestoreReport:
    return restore(backup, data, now_s=NOW_S)


def episodes(data: Path) -> set[str]:
    return {trajectory.episode for trajectory in headrace.open(data, strict=True).trajectories()}


async def test_a_backup_of_a_live_service_has_everything_that_was_acknowledged_before_it_began(
    data_dir: Path, tmp_path: Path
):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run()
        await api.play(free=8)
        acked = await api.pull()
        assert isinstance(acked, Batch)
        await api.ack(acked, "0.1")
        leased, _ = await api.pull_raw(request="leased")
        before = await stored_episodes(api)
        report = await asyncio.to_thread(copy, data_dir, tmp_path / "copy")
        await api.play(free=8)
    assert report.files == report.copied_files > 1
    assert episodes(tmp_path / "copy") == before
    restore_into(tmp_path / "copy", tmp_path / "restored")
    async with orchestrator(tmp_path / "restored") as api:
        assert await stored_episodes(api) == before
        again, _ = await api.pull_raw(request="leased")
        assert again == leased
        assert (await api.ack(acked, "0.2", status=409))["code"] == "batch-already-acked"


async def test_only_new_data_is_copied(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        await api.play(free=12)
        first = await asyncio.to_thread(copy, data_dir, tmp_path / "copy")
        stamps = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "copy" / "log").iterdir()}
        await api.play(free=24)
        second = await asyncio.to_thread(copy, data_dir, tmp_path / "copy")
    assert second.files > first.files > 2
    assert second.copied_files <= second.files - first.files + 1
    for name in sorted(stamps)[:-1]:
        assert (tmp_path / "copy" / "log" / name).stat().st_mtime_ns == stamps[name]
    assert len(episodes(tmp_path / "copy")) == 36


async def test_an_interrupted_backup_leaves_the_previous_one_as_it_was(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        await api.play(free=4)
        await asyncio.to_thread(copy, data_dir, tmp_path / "copy")
        before = episodes(tmp_path / "copy")
        await api.play(free=16)
        whole = copies.copy
        calls = []

        def fail_at_the_second(*arguments: Any) -> str:
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return whole(*arguments)

        monkeypatch.setattr(copies, "copy", fail_at_the_second)
        with pytest.raises(StoreError, match="No space left"):
            await asyncio.to_thread(copy, data_dir, tmp_path / "copy")
        monkeypatch.undo()
    restore_into(tmp_path / "copy", tmp_path / "restored")
    assert episodes(tmp_path / "restored") == before


async def test_an_append_that_was_under_way_is_not_in_the_backup(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
    (file,) = (data_dir / "log").glob("*.log")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: 64 + 10])
    report = copy(data_dir, tmp_path / "copy")
    assert (report.file, report.offset) == (file.name, len(whole))
    assert (tmp_path / "copy" / "log" / file.name).read_bytes() == whole
    (entry,) = read_manifest(tmp_path / "copy").files
    assert (entry.size_bytes, entry.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())


async def test_damage_in_a_backup_is_refused_or_restored_as_it_is_on_request(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
    copy(data_dir, tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "log").glob("*.log")
    flip(file, 100)
    with pytest.raises(CorruptRecord, match=file.name):
        restore_into(tmp_path / "copy", tmp_path / "restored")
    assert list((tmp_path / "restored").iterdir()) == []
    report = restore(tmp_path / "copy", tmp_path / "rest", now_s=NOW_S, despite_damage=True)
    assert report.damaged == [file.name]
    assert len(episodes(tmp_path / "rest")) == 4
    flip(file, 100)
    restore_into(tmp_path / "copy", tmp_path / "restored")


async def test_the_restored_directory_begins_an_epoch_above_every_one_that_the_old_directory_had(
    data_dir: Path, tmp_path: Path
):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        copy(data_dir, tmp_path / "copy")
    for _ in range(3):
        async with orchestrator(data_dir) as api:
            old = (await api.ask("GET", "/v1/status"))["epoch"]
    restored = restore_into(tmp_path / "copy", tmp_path / "restored")
    async with orchestrator(tmp_path / "restored") as api:
        assert (await api.ask("GET", "/v1/status"))["epoch"] > restored.epoch > old
    later = restore(tmp_path / "copy", tmp_path / "again", now_s=NOW_S + 60)
    assert later.epoch > last_epoch(tmp_path / "restored")
    copy(tmp_path / "again", tmp_path / "other")
    assert restore(tmp_path / "other", tmp_path / "skewed", now_s=5).epoch > later.epoch


async def test_files_that_retention_deleted_are_removed_from_the_backup_too(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        await api.play(free=24)
    copy(data_dir, tmp_path / "copy")
    oldest = min((data_dir / "log").glob("*.log"))
    oldest.unlink()
    (tmp_path / "copy" / "log" / "00000002.log.partial").write_bytes(b"of a copy that was killed")
    copy(data_dir, tmp_path / "copy")
    names = {file.name for file in (data_dir / "log").glob("*.log")}
    assert {file.name for file in (tmp_path / "copy" / "log").iterdir()} == names
    assert {file.name for file in read_manifest(tmp_path / "copy").files} == names


async def test_a_file_that_is_deleted_during_a_backup_starts_it_again(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        await api.play(free=24)
    first, second = sorted((data_dir / "log").glob("*.log"))[:2]
    whole = copies.copy

    def deleting(source: Path, *arguments: Any) -> str:
        digest = whole(source, *arguments)
        for file in (first, second):
            file.unlink(missing_ok=True)
        return digest

    monkeypatch.setattr(copies, "copy", deleting)
    report = copy(data_dir, tmp_path / "copy")
    assert report.files == len(list((data_dir / "log").glob("*.log")))
    assert not {first.name, second.name} & {file.name for file in (tmp_path / "copy" / "log").iterdir()}


async def test_assets_are_copied_once_and_compared_with_their_names(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir):
        pass
    contents = [b"one", b"two" * 1000]
    for content in contents:
        asset = asset_path(data_dir, content)
        asset.parent.mkdir(parents=True, exist_ok=True)
        asset.write_bytes(content)
    assert copy(data_dir, tmp_path / "copy").copied_assets == 2
    asset_path(data_dir, contents[0]).unlink()
    report = copy(data_dir, tmp_path / "copy")
    assert (report.copied_assets, report.assets) == (0, 1)
    assert not asset_path(tmp_path / "copy", contents[0]).exists()
    restore_into(tmp_path / "copy", tmp_path / "restored")
    assert asset_path(tmp_path / "restored", contents[1]).read_bytes() == contents[1]
    flip(asset_path(tmp_path / "copy", contents[1]), 1)
    with pytest.raises(CorruptRecord):
        restore_into(tmp_path / "copy", tmp_path / "again")


async def test_a_damaged_asset_is_named_and_does_not_end_the_backup(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir):
        pass
    for content in (b"one", b"two"):
        asset_path(data_dir, content).parent.mkdir(parents=True, exist_ok=True)
        asset_path(data_dir, content).write_bytes(content)
    flip(asset_path(data_dir, b"one"), 0)
    report = copy(data_dir, tmp_path / "copy")
    assert report.damaged_assets == [asset_path(data_dir, b"one").name]
    assert asset_path(tmp_path / "copy", b"two").read_bytes() == b"two"


async def test_the_command_ends_with_5_if_a_damaged_asset_was_not_copied(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir):
        pass
    command = [str(data_dir), str(tmp_path / "copy")]
    assert (await asyncio.to_thread(CliRunner().invoke, backup, command)).exit_code == 0
    asset_path(data_dir, b"one").parent.mkdir(parents=True, exist_ok=True)
    asset_path(data_dir, b"one").write_bytes(b"another")
    assert (await asyncio.to_thread(CliRunner().invoke, backup, command)).exit_code == 5


def asset_path(directory: Path, content: bytes) -> Path:
    name = hashlib.sha256(content).hexdigest()
    return directory / "assets" / name[:2] / name


async def test_a_backup_of_another_log_is_not_overwritten(data_dir: Path, tmp_path: Path):
    for data in (data_dir, tmp_path / "other"):
        async with orchestrator(data) as api:
            await api.create_run()
            await api.play(free=2)
    copy(data_dir, tmp_path / "copy")
    with pytest.raises(InvalidRequest, match="another log"):
        copy(tmp_path / "other", tmp_path / "copy")
    assert episodes(tmp_path / "copy") == episodes(data_dir)


async def test_a_data_directory_is_not_overwritten_and_no_service_starts_on_a_backup(data_dir: Path, tmp_path: Path):
    other = tmp_path / "other"
    for data in (data_dir, other):
        async with orchestrator(data) as api:
            await api.create_run()
            await api.play(free=2)
    stored = episodes(other)
    with pytest.raises(InvalidRequest, match="is a data directory"):
        copy(data_dir, other)
    assert episodes(other) == stored
    copy(data_dir, tmp_path / "copy")
    with pytest.raises(SetupError, match="is a backup"):
        DataDirectory.claim(tmp_path / "copy")
    copy(data_dir, tmp_path / "copy")


async def test_impossible_arguments_are_refused(data_dir: Path, tmp_path: Path):
    with pytest.raises(SetupError, match="not a data directory"):
        copy(tmp_path / "nothing", tmp_path / "copy")
    async with orchestrator(data_dir):
        pass
    with pytest.raises(InvalidRequest, match="is inside"):
        copy(data_dir, data_dir / "copy")
    with pytest.raises(SetupError, match="no backup"):
        restore_into(data_dir, tmp_path / "restored")
    copy(data_dir, tmp_path / "copy")
    with pytest.raises(SetupError, match="not empty"):
        restore_into(tmp_path / "copy", data_dir)
    with copies._exclusive(tmp_path / "copy"), pytest.raises(InvalidRequest, match="under way"):
        copy(data_dir, tmp_path / "copy")


def headrace_command(*arguments: Any) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    report: dict[str, Any] = json.loads(process.stdout)
    return report


async def test_a_backup_under_load_is_restored_without_loss_up_to_the_cut(process: Process, tmp_path: Path):
    accepted: set[str] = set()
    async with aiohttp.ClientSession(process.start(log_file_bytes=64 << 10)) as session:
        api = Api(session)
        await api.create_run(group_size=1, batch_size=2000)

        async def worker(name: str) -> None:
            while True:
                attempts = await api.lease(name, free=8)
                body = submission((a, record_for(a, provenance=Provenance(worker=name))) for a in attempts)
                results = await api.submit(body, worker=name)
                accepted.update(result.episode for result in results if result.verdict == "accepted")
                if not attempts:
                    return

        load = [asyncio.create_task(worker(f"worker-{number}")) for number in range(4)]
        cuts: list[set[str]] = []
        for number in range(3):
            goal = len(accepted) + 40
            await until(lambda goal=goal: _reached(accepted, goal), deadline_s=60)
            cuts.append(set(accepted))
            if number < 2:
                await asyncio.to_thread(copy, process.data, tmp_path / "copy")
            else:
                await asyncio.to_thread(headrace_command, "backup", process.data, tmp_path / "copy")
        process.kill()
        await asyncio.gather(*load, return_exceptions=True)
        old = last_epoch(process.data)

    restored = headrace_command("restore", tmp_path / "copy", tmp_path / "restored")
    assert restored["epoch"] > old
    again = Process(tmp_path / "restored")
    try:
        async with aiohttp.ClientSession(again.start()) as session:
            api = Api(session)
            stored = await stored_episodes(api)
            assert cuts[0] < cuts[1] < cuts[2] <= stored
            await api.play(free=4)
            assert (await api.ask("GET", "/v1/status"))["epoch"] > old
    finally:
        again.end()


async def _reached(accepted: set[str], goal: int) -> bool:
    return len(accepted) >= goal


async def stored_and_copied(data: Path, destination: Path) -> set[str]:
    """Files of a log, all of them in a backup; returns their names."""
    async with orchestrator(data, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        for _ in range(4):
            await api.play(free=8)
    copy(data, destination)
    names = {file.name for file in (destination / "log").iterdir()}
    assert len(names) > 3
    return names


@pytest.mark.parametrize("which", [1, -1])
async def test_data_that_the_directory_lost_stays_in_the_backup(data_dir: Path, tmp_path: Path, which: int):
    names = await stored_and_copied(data_dir, tmp_path / "copy")
    before = episodes(tmp_path / "copy")
    (data_dir / "log" / sorted(names)[which]).unlink()
    with pytest.raises(InvalidRequest, match=sorted(names)[which]):
        copy(data_dir, tmp_path / "copy")
    async with orchestrator(data_dir) as api:
        await api.ask("GET", "/v1/runs/run")
    with pytest.raises(InvalidRequest, match=sorted(names)[which]):  # even if a file of that name exists again
        copy(data_dir, tmp_path / "copy")
    assert episodes(tmp_path / "copy") == before
    assert copy(data_dir, tmp_path / "another").files > 1


@pytest.mark.parametrize("harm", ["cut", "flipped"])
async def test_a_file_that_was_damaged_after_it_was_copied_stays_intact_in_the_backup(
    data_dir: Path, tmp_path: Path, harm: str
):
    names = await stored_and_copied(data_dir, tmp_path / "copy")
    before = episodes(tmp_path / "copy")
    harmed = data_dir / "log" / sorted(names)[1]
    if harm == "cut":
        harmed.write_bytes(harmed.read_bytes()[:5000])
    else:
        flip(harmed, harmed.stat().st_size - 20)
    report = copy(data_dir, tmp_path / "copy")
    assert report.kept_files == [harmed.name]
    assert episodes(tmp_path / "copy") == before
    restore_into(tmp_path / "copy", tmp_path / "restored")
    assert episodes(tmp_path / "restored") == before


async def test_a_file_that_was_damaged_in_the_backup_is_copied_again(data_dir: Path, tmp_path: Path):
    names = await stored_and_copied(data_dir, tmp_path / "copy")
    harmed = tmp_path / "copy" / "log" / sorted(names)[1]
    flip(harmed, 20)
    assert copy(data_dir, tmp_path / "copy").kept_files == []
    restore_into(tmp_path / "copy", tmp_path / "restored")

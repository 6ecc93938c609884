"""``headrace fsck``: damage is listed, and the projection is rebuilt from the log alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.assets import make_asset
from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.store.asset_files import asset_path
from headrace.store.log_files import path_of
from headrace.store.log_format import FileHead, FrameType, pack_frame, scan
from headrace.trajectory import Asset, Failure, Version
from headrace.wire import codec
from headrace_orchestrator.cli.app import cli
from headrace_orchestrator.cli.fsck import DAMAGED, LOST
from headrace_orchestrator.service.fsck.findings import FsckFinding, FsckReport
from headrace_orchestrator.service.fsck.fsck import check, rebuild
from tests.builders import make_trajectory
from tests.orchestrator.buffer.test_assets import claim, send, showing
from tests.orchestrator.buffer.test_log import flip
from tests.orchestrator.buffer.test_projection import rows
from tests.orchestrator.serving import Api, orchestrator, record_for, submission
from tests.sdk.test_offline import listing

SMALL_FILE_BYTES = 8 << 10


async def play_history(api: Api) -> tuple[Batch, Batch]:
    """Play a run until it has an acked batch, an open one and further groups; returns the two batches."""
    await api.create_run()
    await api.play(free=8)
    acked = await api.pull()
    assert isinstance(acked, Batch)
    await api.ack(acked, "0.1")
    opened = await api.pull()
    assert isinstance(opened, Batch)
    await api.play(free=8)
    return acked, opened


def frames(data: Path) -> list[tuple[Path, Any]]:
    """Every frame of the log, with its file."""
    all_frames = []
    for file in sorted((data / "log").glob("*.log")):
        with file.open("rb") as stream:
            all_frames += [(file, item) for item in scan(stream)]
    return all_frames


def fsck(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["fsck", *map(str, arguments)])


def only(report: FsckReport) -> FsckFinding:
    (finding,) = report.findings
    return finding


async def test_a_sound_directory_ends_with_0_and_nothing_is_written(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await play_history(api)
    before = listing(data_dir)
    result = fsck(data_dir)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "All is sound" in result.stderr
    report = json.loads(fsck(data_dir, "--json").stdout)
    assert report["findings"] == []
    assert report["files"] > 1
    assert report["frames"]["trajectory"] >= 8
    assert report["frames"]["footer"] == report["files"] - 1
    assert listing(data_dir) == before


async def test_the_directory_of_a_running_service_is_checked(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await play_history(api)
        for _ in range(3):
            report, _ = await asyncio.gather(asyncio.to_thread(check, data_dir), api.play(free=2))
            assert report.live
            assert report.findings == []


async def test_lost_records_end_with_5_and_are_named_with_their_cost(data_dir: Path):
    async with orchestrator(data_dir) as api:
        _acked, _ = await play_history(api)
    file, frame = next((file, item) for file, item in frames(data_dir) if item.type is FrameType.TRAJECTORY)
    flip(file, frame.offset + 64 + 30)
    result = fsck(data_dir)
    assert result.exit_code == LOST
    assert f"log/{file.name} at offset {frame.offset}" in result.stdout
    assert "1 file, " in result.stderr
    assert result.stderr.splitlines()[-1] == "1 finding."
    finding = only(check(data_dir))
    assert (finding.kind, finding.type, finding.lost) == ("record", "trajectory", True)
    assert (finding.offset, finding.size_bytes) == (frame.offset, frame.size)
    assert len(finding.names) == 1
    assert finding.names[0] in result.stdout
    assert "trajectory is lost" in finding.cost
    # The projection knows its name even if the record is unreadable.
    flip(file, frame.offset + 9)
    assert only(check(data_dir)).names == finding.names


async def test_a_damaged_batch_is_named(data_dir: Path):
    async with orchestrator(data_dir) as api:
        acked, _opened = await play_history(api)
    hit = [(file, item) for file, item in frames(data_dir) if item.type is FrameType.BATCH]
    flip(hit[0][0], hit[0][1].offset + 100)
    finding = only(check(data_dir))
    assert (finding.type, finding.names, finding.lost) == ("batch", [acked.id], True)


@pytest.mark.parametrize("copy", [0, 1])
async def test_redundant_damage_ends_with_6_for_one_damaged_copy_of_an_event(data_dir: Path, copy: int):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    file, frame = next((file, item) for file, item in frames(data_dir) if item.type is FrameType.CONTROL)
    flip(file, frame.offset + copy * frame.size // 2 + 64)
    assert fsck(data_dir).exit_code == DAMAGED
    finding = only(check(data_dir))
    assert (finding.kind, finding.type, finding.lost) == ("copy", "control", False)


async def test_an_event_with_both_copies_damaged_is_lost(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    file, frame = [(file, item) for file, item in frames(data_dir) if item.type is FrameType.CONTROL][-1]
    for copy in range(2):
        flip(file, frame.offset + copy * frame.size // 2 + 64)
    assert fsck(data_dir).exit_code == LOST
    assert "decisions" in only(check(data_dir)).cost


async def test_heads_and_footers_are_checked(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await play_history(api)
    for kind, lost in ((FrameType.FOOTER, False), (FrameType.FILE_HEAD, False)):
        file, frame = [(file, item) for file, item in frames(data_dir) if item.type is kind][-1]
        for copy in range(2):
            flip(file, frame.offset + copy * frame.size // 2 + 64)
        finding = only(check(data_dir))
        assert (finding.kind, finding.lost) == ({FrameType.FOOTER: "footer"}.get(kind, "head"), lost)
        for copy in range(2):
            flip(file, frame.offset + copy * frame.size // 2 + 64)
    assert check(data_dir).findings == []


async def test_the_footer_reveals_a_replaced_frame(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await play_history(api)
    records = [(file, item) for file, item in frames(data_dir) if item.type is FrameType.TRAJECTORY]
    first, second = next(
        (one, other)
        for one, other in itertools.pairwise(records)
        if one[0] == other[0] and one[1].size == other[1].size and one[0].name != records[-1][0].name
    )
    file = first[0]
    data = bytearray(file.read_bytes())
    copy = bytes(data[second[1].offset : second[1].offset + second[1].size])
    data[first[1].offset : first[1].offset + first[1].size] = copy
    file.write_bytes(data)
    assert "footer" in {finding.kind for finding in check(data_dir).findings}


async def test_a_file_that_is_missing_or_cut_short_is_named(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await play_history(api)
    files = sorted((data_dir / "log").glob("*.log"))
    assert len(files) >= 3
    whole = files[1].read_bytes()
    last = [item for file, item in frames(data_dir) if file == files[1]][-2:]
    files[1].write_bytes(whole[: last[0].offset])
    findings = [finding for finding in check(data_dir).findings if finding.kind == "file"]
    assert [(finding.file, finding.size_bytes, finding.lost) for finding in findings] == [
        (f"log/{files[1].name}", len(whole) - last[0].offset, True)
    ]
    files[1].write_bytes(whole)
    files[1].unlink()
    (finding,) = check(data_dir).findings
    assert (finding.kind, finding.problem) == ("file", "00000002.log after it is missing")


async def test_records_deleted_by_retention_are_not_damage_while_listings_still_have_them(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run()
        asset = make_asset(b"an image", "image/png")
        assert await claim(api, asset)
        await send(api, asset)
        await api.play(free=8, **showing(asset))
        for _ in range(3):
            await api.play(free=8)
    (data_dir / "log" / "00000001.log").unlink()
    assert check(data_dir).findings == []


async def test_the_projection_reveals_a_truncated_log(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    items = [item for _, item in frames(data_dir)]
    file = path_of(data_dir / "log", 1)
    last = next(item for item in reversed(items) if item.type is FrameType.TRAJECTORY)
    file.write_bytes(file.read_bytes()[: last.offset])
    finding = only(check(data_dir))
    assert (finding.kind, finding.lost, finding.offset) == ("file", True, last.offset)
    assert len(finding.names) == 1


async def test_an_unfinished_append_is_not_damage(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    file = path_of(data_dir / "log", 1)
    with file.open("ab") as stream:
        stream.write(file.read_bytes()[:100])
    result = fsck(data_dir)
    assert result.exit_code == 0
    assert "last 100 bytes are an unfinished append" in result.stderr


async def test_assets_that_are_damaged_or_missing_are_named(data_dir: Path):
    data = [f"asset {number}".encode() for number in range(2)]
    names = [make_asset(each, "image/png").name for each in data]
    stored = [Asset(name=name, media_type="image/png", size_bytes=7) for name in names]
    (data_dir / "log").mkdir(parents=True)
    head = FileHead(log="log", number=1, epoch=1, before_bytes=0, state=None)
    with path_of(data_dir / "log", 1).open("wb") as stream:
        stream.writelines(pack_frame(FrameType.FILE_HEAD, msgspec.msgpack.encode(head)))
        stream.writelines(pack_frame(FrameType.TRAJECTORY, codec.encode(make_trajectory(assets=stored))))
    for name, content in zip(names, data, strict=True):
        path = asset_path(data_dir / "assets", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert check(data_dir).findings == []
    assert check(data_dir).assets == 2
    flip(asset_path(data_dir / "assets", names[0]), 3)
    asset_path(data_dir / "assets", names[1]).unlink()
    findings = check(data_dir).findings
    assert [(finding.kind, finding.names, finding.lost) for finding in findings] == [
        ("asset", [names[0]], True),
        ("asset", [names[1]], True),
    ]


async def test_a_projection_that_differs_from_the_log_is_named_and_rebuilt(data_dir: Path):
    async with orchestrator(data_dir) as api:
        acked, _ = await play_history(api)
    file = data_dir / "projection.sqlite"
    lived = rows(file)
    changes = {
        "UPDATE trajectories SET status = 'failed' WHERE id = :trajectory": "trajectories",
        "DELETE FROM trajectories WHERE id = :trajectory": "trajectories",
        "UPDATE batches SET state = 'open' WHERE id = :batch": "batches",
        "DELETE FROM batch_members WHERE group_id = :group": "batch_members",
    }
    values = {
        "trajectory": acked.trajectories[0].id,
        "batch": acked.id,
        "group": acked.manifest.groups[0].id,
    }
    for change, table in changes.items():
        with sqlite3.connect(file) as connection:
            connection.execute(change, values)
        connection.close()
        findings = check(data_dir).findings
        assert {finding.kind for finding in findings} == {"projection"}
        assert table in findings[0].problem
        assert set(findings[0].names) <= set(values.values())
        assert fsck(data_dir).exit_code == DAMAGED
        result = fsck("--rebuild", data_dir)
        assert result.exit_code == 0, result.output
        assert rows(file) == lived
    async with orchestrator(data_dir) as api:
        assert len((await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]) >= 8


@pytest.mark.parametrize("damage", [b"this is no database" * 100, b""])
async def test_an_unreadable_projection_is_named(data_dir: Path, damage: bytes):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    lived = rows(data_dir / "projection.sqlite")
    (data_dir / "projection.sqlite").write_bytes(damage)
    assert fsck(data_dir).exit_code == DAMAGED
    assert only(check(data_dir)).kind == "projection"
    rebuild(data_dir)
    assert rows(data_dir / "projection.sqlite") == lived


async def test_a_projection_is_not_rebuilt_under_a_running_service(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await play_history(api)
        before = (data_dir / "projection.sqlite").stat().st_ino
        result = fsck("--rebuild", data_dir)
        assert result.exit_code == 1
        assert "running orchestrator" in result.stderr
        assert (data_dir / "projection.sqlite").stat().st_ino == before


async def test_a_directory_without_a_projection_is_sound(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await play_history(api)
    (data_dir / "projection.sqlite").unlink()
    assert check(data_dir).findings == []
    for arguments in ((data_dir.parent,), ("--rebuild", data_dir.parent)):
        result = fsck(*arguments)
        assert result.exit_code == 1
        assert "not a data directory" in result.stderr


OPERATIONS = ("play", "play", "fail", "pull", "ack", "create", "close", "restart")


async def live_through(data: Path, operations: list[str]) -> None:
    """A random history of runs, over restarts, in small files."""
    names, waiting = ["run"], list(operations)
    once = True
    while waiting or once:
        async with orchestrator(data, log_file_bytes=SMALL_FILE_BYTES) as api:
            if once:
                await api.create_run(max_staleness=2)
                once = False
            open_batches: list[Batch] = []
            while waiting and (operation := waiting.pop(0)) != "restart":
                await take(api, operation, names, open_batches)


async def take(api: Api, operation: str, names: list[str], open_batches: list[Batch]) -> None:
    run = names[-1]
    if operation == "play":
        await api.play(free=3)
    elif operation == "fail":
        failure = Failure(layer="environment", kind="broke", message="It broke.")
        broken = {"status": "failed", "stop_reason": "failure", "failure": failure, "segments": []}
        await api.submit(submission((a, record_for(a, **broken)) for a in await api.lease(free=2)))
    elif operation == "pull":
        batch = await api.pull(run)
        open_batches += [batch] if isinstance(batch, Batch) else []
    elif operation == "ack" and open_batches:
        batch = open_batches.pop()
        version = (await api.ask("GET", f"/v1/runs/{batch.run}"))["version"]
        await api.ack(batch, str(Version(Version.parse(version).lineage, Version.parse(version).n + 1)))
    elif operation == "create":
        names.append(f"run-{len(names)}")
        await api.create_run(name=names[-1], group_size=1, batch_size=1)
    elif operation == "close":
        await api.ask("POST", f"/v1/runs/{run}/close")
        open_batches[:] = [batch for batch in open_batches if batch.run != run]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=25))
def test_a_rebuilt_projection_equals_the_original_one_after_every_history(tmp_path: Path, operations: list[str]):
    data = tmp_path / new_id()
    asyncio.run(live_through(data, operations))
    assert check(data).findings == []
    lived = rows(data / "projection.sqlite")
    rebuild(data)
    assert rows(data / "projection.sqlite") == lived
    assert check(data).findings == []


async def test_an_unreadable_file_is_lost_and_not_only_its_head(data_dir: Path):
    async with orchestrator(data_dir, log_file_bytes=SMALL_FILE_BYTES) as api:
        await api.create_run(group_size=1, batch_size=64)
        for _ in range(4):
            await api.play(free=8)
    harmed = sorted((data_dir / "log").glob("*.log"))[1]
    harmed.write_bytes(bytes(harmed.stat().st_size))
    findings = [finding for finding in check(data_dir).findings if finding.file == f"log/{harmed.name}"]
    assert [(finding.kind, finding.lost) for finding in findings] == [("record", True)]
    assert findings[0].names
    assert "No record is lost" not in findings[0].cost
    assert fsck(data_dir).exit_code == LOST
    (data_dir / "projection.sqlite").unlink()  # then its content is unknown
    assert fsck(data_dir).exit_code == LOST

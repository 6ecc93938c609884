"""What an earlier version stored is read without a service: whole, and as that version read it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

import headrace
from headrace.batch.body import pack_head, read_head
from headrace.runspec import parse_run_spec
from headrace.store.log_format import FileHead, Frame, FrameType, parse_head
from headrace.wire import codec
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import GroupAdmitted, RunCreated
from headrace_orchestrator.scheduler.state.admission.task_sources import sampling_seed, source_of
from headrace_orchestrator.service.storage.frames import events_of
from tests.compatibility.conftest import ARCHIVES, Earlier
from tests.compatibility.orchestrator_process import HEADRACE
from tests.compatibility.summary import control_records, differences, exported, frames, stored
from tests.compatibility.write_data import KINDS


def test_there_are_data_of_0_1_0() -> None:
    assert "0.1.0.tar.xz" in [archive.name for archive in ARCHIVES]


def test_the_log_holds_every_kind_of_control_record_and_opens_with_a_state_in_its_later_files(earlier: Earlier) -> None:
    assert {record["type"] for record in control_records(earlier.data)} >= KINDS
    assert len([head for head in _heads(earlier.data) if head.state is not None and len(head.state) > 10_000]) >= 2


def test_headrace_open_gives_the_same_runs_trajectories_batches_and_assets(earlier: Earlier) -> None:
    assert differences(earlier.expected["data"]["stored"], stored(earlier.data)) == []
    assert differences(earlier.expected["backup"]["stored"], stored(earlier.backup)) == []


def test_every_record_is_read_with_all_its_fields(earlier: Earlier) -> None:
    read = [frame for frame in frames(earlier.data) if frame.type in (FrameType.CONTROL, *ENCODED)]
    assert {frame.type for frame in read} == {FrameType.CONTROL, *ENCODED}
    # A field that was renamed would be passed over as unknown, and missing here.
    assert [frame for frame in read if _encoded_again(frame) != frame.payload] == []


ENCODED = (FrameType.TRAJECTORY, FrameType.BATCH)
"""Frames whose payload is not a list of events."""


def _encoded_again(frame: Frame) -> bytes:
    if frame.type is FrameType.TRAJECTORY:
        return codec.encode(codec.decode(frame.payload))
    if frame.type is FrameType.BATCH:
        head = read_head(frame.payload)
        return pack_head(head.manifest, head.columns)
    events, _ = events_of(frame)
    return msgspec.msgpack.encode(events)


def test_every_control_state_is_restored_whole(earlier: Earlier) -> None:
    for head in _heads(earlier.data):
        assert _restored(head).snapshot() == _state(head)


def test_the_records_of_a_file_lead_from_its_state_to_that_of_the_next(earlier: Earlier) -> None:
    scheduler, states = None, 0
    for frame in frames(earlier.data):
        if frame.type is FrameType.FILE_HEAD:
            head = parse_head(frame.payload)
            assert scheduler is None or _sorted(scheduler.snapshot()) == _sorted(_state(head))
            scheduler, states = _restored(head), states + 1
        elif frame.type is not FrameType.FOOTER:
            assert scheduler is not None
            for event in events_of(frame)[0]:
                scheduler.apply(event, now=0.0)
    assert states >= 3


def _heads(data: Path) -> list[FileHead]:
    return [parse_head(frame.payload) for frame in frames(data) if frame.type is FrameType.FILE_HEAD]


def _state(head: FileHead) -> bytes:
    """The scheduler's part of a control state."""
    core, _ = msgspec.msgpack.decode(head.state or b"", type=tuple[bytes, bytes])
    return core


def _sorted(state: bytes) -> list:
    """With workers by name: they are stored in the order in which a service met them, which is not recorded."""
    version, runs, workers, draining = msgspec.msgpack.decode(state)
    return [version, runs, sorted(workers), draining]


def _restored(head: FileHead) -> Scheduler:
    scheduler = Scheduler(epoch=1, new_id=str, new_nonce=str)
    scheduler.restore(_state(head), now=0.0)
    return scheduler


def test_a_run_draws_the_tasks_and_seeds_that_it_drew_before(earlier: Earlier) -> None:
    specs, drawn = {}, 0
    for frame in frames(earlier.data):
        for event in events_of(frame)[0] if frame.type is FrameType.CONTROL else ():
            if isinstance(event, RunCreated):
                specs[event.run] = parse_run_spec(event.spec)
            elif isinstance(event, GroupAdmitted) and event.position >= 0:
                spec, drawn = specs[event.run], drawn + 1
                assert source_of(spec).task(event.position) == event.task
                seeds = [sampling_seed(spec.seed, event.position, member.member) for member in event.members]
                assert seeds == [member.sampling_seed for member in event.members]
    assert drawn > 40


def test_fsck_finds_nothing(earlier: Earlier) -> None:
    for folder in (earlier.data, earlier.backup):
        done = subprocess.run([HEADRACE, "fsck", folder, "--json"], capture_output=True, text=True, check=False)
        assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, [])


def test_an_export_of_json_lines_has_every_field_of_every_record(earlier: Earlier, tmp_path: Path) -> None:
    assert differences(earlier.expected["data"]["exported"], exported(earlier.data, tmp_path / "lines")) == []
    names = {path.name for path in (tmp_path / "lines" / "assets").glob("*/*")}
    assert names == earlier.expected["data"]["stored"]["assets"].keys()


def test_an_export_of_parquet_has_the_tokens_and_rewards_of_every_record(earlier: Earlier, tmp_path: Path) -> None:
    subprocess.run([HEADRACE, "export", earlier.data, tmp_path / "tables"], check=True, capture_output=True)
    rows = [row for file in (tmp_path / "tables").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    lines = earlier.expected["data"]["exported"]
    assert [_tokens(row) for row in rows] == [_tokens(line) for line in lines]


def _tokens(line: dict) -> list:
    segments = [
        (segment["token_ids"], segment["logprobs"], [turn["reward"] for turn in segment["turns"]])
        for segment in line["segments"]
    ]
    return [line["id"], line["status"], segments]


def test_the_filters_of_headrace_open_find_the_same(earlier: Earlier) -> None:
    lines = earlier.expected["data"]["exported"]
    tagged = [line["id"] for line in lines if "sums" in line["task"].get("tags", [])]
    assert tagged
    assert [found.id for found in headrace.open(earlier.data).trajectories(run="guess", tags=["sums"])] == tagged

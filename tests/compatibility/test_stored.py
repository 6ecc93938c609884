"""Data of an earlier version are read without a service: completely, and as that version read them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
from msgspec.structs import replace

import headrace
from headrace.batch.body import pack_head, read_head
from headrace.runspec import parse_run_spec
from headrace.store.log_format import FileHead, Frame, FrameType, parse_head
from headrace.wire import codec
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import GroupAdmitted, RunCreated
from headrace_orchestrator.scheduler.snapshot import SharesRow, SnapshotGroup, SnapshotState
from headrace_orchestrator.scheduler.state.admission.task_sources import sampling_seed, source_of
from headrace_orchestrator.service.storage.frames import events_of
from tests.compatibility.conftest import ARCHIVES, EarlierData
from tests.compatibility.orchestrator_process import HEADRACE
from tests.compatibility.summary import control_events, differences, exported, frames, stored
from tests.compatibility.write_data import KINDS


def test_data_of_0_1_0_are_tested() -> None:
    assert "0.1.0.tar.xz" in [archive.name for archive in ARCHIVES]


def test_the_log_has_every_kind_of_event_and_its_later_files_begin_with_a_state(earlier: EarlierData) -> None:
    assert {event["type"] for event in control_events(earlier.data)} >= KINDS
    assert len([head for head in _heads(earlier.data) if head.state is not None and len(head.state) > 10_000]) >= 2


def test_headrace_open_gives_the_same_runs_trajectories_batches_and_assets(earlier: EarlierData) -> None:
    assert differences(earlier.expected["data"]["stored"], stored(earlier.data)) == []
    assert differences(earlier.expected["backup"]["stored"], stored(earlier.backup)) == []


def test_every_record_is_read_with_all_its_fields(earlier: EarlierData) -> None:
    all_frames = [frame for frame in frames(earlier.data) if frame.type in (FrameType.CONTROL, *ENCODED)]
    assert {frame.type for frame in all_frames} == {FrameType.CONTROL, *ENCODED}
    # A renamed field would be skipped as unknown, and be missing here.
    assert [frame for frame in all_frames if _encoded_again(frame) != frame.payload] == []


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


def test_every_control_state_is_restored_completely(earlier: EarlierData) -> None:
    for head in _heads(earlier.data):
        assert _complete(_restored(head).snapshot()) == _complete(_state(head))


def test_the_events_of_a_file_lead_from_its_state_to_that_of_the_next(earlier: EarlierData) -> None:
    scheduler, states = None, 0
    for frame in frames(earlier.data):
        if frame.type is FrameType.FILE_HEAD:
            head = parse_head(frame.payload)
            assert scheduler is None or _counted(_complete(scheduler.snapshot())) == _counted(_complete(_state(head)))
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


def _counted(state: SnapshotState) -> SnapshotState:
    """The state without the counts that not every version keeps: events count on from where the state began."""
    runs = [
        replace(
            run,
            shares=SharesRow(),
            run=replace(run.run, returned={}),
            policy_servers=replace(run.policy_servers, sampled={}, confirmed=True),
        )
        for run in state.runs
    ]
    return replace(state, runs=runs)


def _complete(state: bytes) -> SnapshotState:
    """The state with the defaults of fields that its version did not have, and with workers sorted by name: their
    stored order depends on requests that are not in the log."""
    stored = msgspec.msgpack.decode(state, type=SnapshotState)
    runs = [
        replace(run, spec=parse_run_spec(run.spec).model_dump(), groups=list(map(_complete_group, run.groups)))
        for run in stored.runs
    ]
    return replace(stored, runs=runs, workers=sorted(stored.workers, key=lambda worker: worker.name))


def _complete_group(encoded: msgspec.Raw) -> SnapshotGroup:
    group = msgspec.msgpack.decode(encoded, type=SnapshotGroup)
    return replace(group, members=[replace(member, reward_errors={}) for member in group.members])


def _restored(head: FileHead) -> Scheduler:
    scheduler = Scheduler(epoch=1, new_id=str, new_nonce=str)
    scheduler.restore(_state(head), now=0.0)
    return scheduler


def test_a_run_draws_the_same_tasks_and_seeds_as_before(earlier: EarlierData) -> None:
    specs, drawn = {}, 0
    for frame in frames(earlier.data):
        for event in events_of(frame)[0] if frame.type is FrameType.CONTROL else ():
            if isinstance(event, RunCreated):
                specs[event.run] = parse_run_spec(event.spec)
            elif isinstance(event, GroupAdmitted) and event.position >= 0:
                spec, drawn = specs[event.run], drawn + 1
                assert source_of(spec).next_task(event.position, ()) == (event.position, event.task)
                seeds = [sampling_seed(spec.seed, event.position, member.member) for member in event.members]
                assert seeds == [member.sampling_seed for member in event.members]
    assert drawn > 40


def test_fsck_finds_nothing(earlier: EarlierData) -> None:
    for folder in (earlier.data, earlier.backup):
        process = subprocess.run([HEADRACE, "fsck", folder, "--json"], capture_output=True, text=True, check=False)
        assert (process.returncode, json.loads(process.stdout)["findings"]) == (0, [])


def test_an_export_of_json_lines_has_every_field_of_every_record(earlier: EarlierData, tmp_path: Path) -> None:
    assert differences(earlier.expected["data"]["exported"], exported(earlier.data, tmp_path / "lines")) == []
    names = {path.name for path in (tmp_path / "lines" / "assets").glob("*/*")}
    assert names == earlier.expected["data"]["stored"]["assets"].keys()


def test_an_export_of_parquet_has_the_tokens_and_rewards_of_every_record(earlier: EarlierData, tmp_path: Path) -> None:
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


def test_the_filters_of_headrace_open_select_the_same_trajectories(earlier: EarlierData) -> None:
    lines = earlier.expected["data"]["exported"]
    tagged = [line["id"] for line in lines if "sums" in line["task"].get("tags", [])]
    assert tagged
    assert [item.id for item in headrace.open(earlier.data).trajectories(run="guess", tags=["sums"])] == tagged

"""``headrace export``: the exported data equals the stored data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import headrace
from headrace.assets import make_asset
from headrace.store.asset_files import asset_path, read_asset
from headrace.store.log_format import FrameType, pack_frame
from headrace.store.tables import table_schema, tables
from headrace.trajectory import Asset, ContentPart, Message, Segment, Task, Trajectory, Turn, Version
from headrace.wire import codec
from headrace_orchestrator.cli.app import cli
from tests.builders import make_failed, make_multi_agent, make_multi_segment, make_trajectory, make_truncated

STORED = [
    make_trajectory(number=1, turns=3, version=Version(0, 1), infos=[{"a": 1}, {"b": [2.5]}]),
    make_truncated(
        number=2, run="other", task=Task(environment="test:Other", seed=(1 << 64) - 1, kwargs={"k": [1]}, tags=["hard"])
    ),
    make_failed(number=3),
    make_multi_segment(number=4),
    make_multi_agent(number=5, task=Task(environment="test:Echo", seed=5, example={"question": "?"})),
    make_trajectory(
        number=6,
        messages=[
            Message(
                role="user",
                content=[ContentPart(type="text", text="see "), ContentPart(type="image", asset="a" * 64)],
            )
        ],
        assets=[Asset(name="a" * 64, media_type="image/png", size_bytes=7)],
    ),
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A data directory with the trajectories ``STORED`` in its log."""
    (tmp_path / "data" / "log").mkdir(parents=True)
    frames = (pack_frame(FrameType.TRAJECTORY, codec.encode(trajectory)) for trajectory in STORED)
    (tmp_path / "data" / "log" / "00000001.log").write_bytes(b"".join(part for frame in frames for part in frame))
    return tmp_path / "data"


def export(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_a_table_has_tokens_logprobs_and_rewards_of_the_record(stored: Path, tmp_path: Path):
    result = export(stored, tmp_path / "out")
    assert result.exit_code == 0, result.output
    table = rows(tmp_path / "out")
    assert [row["id"] for row in table] == [trajectory.id for trajectory in STORED]
    for row, trajectory in zip(table, STORED, strict=True):
        assert (row["run"], row["environment"]) == (trajectory.run, trajectory.task.environment)
        assert (row["status"], row["seed"]) == (trajectory.status, str(trajectory.task.seed))
        for got, segment in zip(row["segments"], trajectory.segments, strict=True):
            assert got["token_ids"] == segment.token_ids.tolist()
            assert got["sampled"] == segment.sampled.tolist()
            assert got["logprobs"] == segment.logprobs.tolist()
            assert [turn["reward"] for turn in got["turns"]] == [turn.reward for turn in segment.turns]
            assert [version["version"] for version in got["versions"]] == [str(v.version) for v in segment.versions]
    assert json.loads(table[0]["infos"]) == STORED[0].infos
    assert (table[0]["version_min"], table[3]["version_max"]) == ("0.1", "0.2")
    assert json.loads(table[4]["example"]) == {"question": "?"}
    assert table[5]["messages"][0]["content"] == "see "
    assert table[5]["messages"][0]["images"] == ["a" * 64]


def test_a_failed_trajectory_has_no_reward(stored: Path, tmp_path: Path):
    export(stored, tmp_path / "out")
    table = rows(tmp_path / "out")
    assert [row["reward"] for row in table] == [1.0, 1.0, None, 1.25, 1.0, 1.0]
    assert table[2]["failure"]["kind"] == "step-raised"
    assert table[0]["failure"] is None


def test_a_line_of_json_has_every_field_of_the_record(stored: Path, tmp_path: Path):
    assert export(stored, tmp_path / "out", "--format", "jsonl").exit_code == 0
    (file,) = (tmp_path / "out").iterdir()
    lines = file.read_text().splitlines()
    assert len(lines) == len(STORED)
    for line, trajectory in zip(lines, STORED, strict=True):
        assert json.loads(line).keys() == set(Trajectory.__struct_fields__)
        assert codec.encode(read(line)) == codec.encode(trajectory)


def read(line: str) -> Trajectory:
    """The trajectory of a JSON line."""
    import numpy as np

    kinds = {"token_ids": np.int32, "sampled": np.uint8, "logprobs": np.float32}
    fields = json.loads(line)
    for segment in fields["segments"]:
        segment.update({name: np.array(segment[name], kind) for name, kind in kinds.items()})
    return msgspec.convert(fields, Trajectory, dec_hook=lambda kind, value: value)


def test_a_dataset_folder_names_its_split(stored: Path, tmp_path: Path):
    assert export(stored, tmp_path / "out", "--format", "dataset").exit_code == 0
    assert [row["id"] for row in rows(tmp_path / "out" / "data")] == [trajectory.id for trajectory in STORED]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "path: data/train-*.parquet" in card
    assert "6 trajectories of run, other" in card


def test_large_exports_have_many_files(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace_orchestrator.cli.export.SHARD_BYTES", 1)
    monkeypatch.setattr("headrace.store.tables.TABLE_TOKENS", 1)
    for kind in ("parquet", "jsonl"):
        assert export(stored, tmp_path / kind, "--format", kind).exit_code == 0
        assert len(list((tmp_path / kind).iterdir())) >= len(STORED)
    assert [row["id"] for row in rows(tmp_path / "parquet")] == [trajectory.id for trajectory in STORED]


def test_only_matching_trajectories_are_exported(stored: Path, tmp_path: Path):
    for number, (criteria, count) in enumerate(
        [
            (("--run", "other"), 1),
            (("--status", "failed"), 1),
            (("--environment", "test:Echo"), 5),
            (("--low", "0.1", "--high", "0.1"), 2),
            (("--evaluation", ""), 6),
            (("--tag", "hard"), 1),
            (("--tag", "hard", "--tag", "easy"), 0),
        ]
    ):
        result = export(stored, tmp_path / str(number), "--json", *criteria)
        assert json.loads(result.stdout)["trajectories"] == count, criteria


def test_a_damaged_record_is_named_and_left_out_and_with_strict_it_ends_the_export(stored: Path, tmp_path: Path):
    file = stored / "log" / "00000001.log"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    result = export(stored, tmp_path / "out")
    assert result.exit_code == 0
    assert "Left out: 00000001.log at offset 0" in result.stderr
    assert len(rows(tmp_path / "out")) == len(STORED) - 1
    result = export(stored, tmp_path / "strict", "--strict")
    assert result.exit_code == 1
    assert "offset 0 of 00000001.log" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_an_existing_folder_is_not_changed(stored: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    result = export(stored, tmp_path / "out")
    assert result.exit_code == 1
    assert "already exists" in result.stderr


def test_without_pyarrow_the_error_names_the_extra(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = export(stored, tmp_path / "out")
    assert result.exit_code == 1
    assert "pip install 'headrace[export]'" in result.stderr
    assert export(stored, tmp_path / "lines", "--format", "jsonl").exit_code == 0


def test_assets_of_the_exported_trajectories_are_exported_with_them(tmp_path: Path):
    intact, lost = (make_asset(content, "image/png") for content in (b"an image", b"another"))
    log = tmp_path / "data" / "log"
    log.mkdir(parents=True)
    record = codec.encode(make_trajectory(assets=[intact.entry, lost.entry]))
    (log / "00000001.log").write_bytes(b"".join(pack_frame(FrameType.TRAJECTORY, record)))
    path = asset_path(tmp_path / "data" / "assets", intact.name)
    path.parent.mkdir(parents=True)
    path.write_bytes(intact.data)
    report = json.loads(export(tmp_path / "data", tmp_path / "out", "--json").stdout)
    assert (report["assets"], list(report["damaged_assets"])) == (1, [lost.name])
    assert read_asset(tmp_path / "out" / "assets", intact.name) == intact.data
    assert export(tmp_path / "data", tmp_path / "strict", "--strict").exit_code == 1


def test_every_field_of_a_record_has_its_column():
    columns = {field.name: field.type for field in table_schema()}
    segment = {field.name for field in columns["segments"].value_type}
    turn = {field.name for field in columns["segments"].value_type.field("turns").type.value_type}
    assert set(Trajectory.__struct_fields__) - {"task"} <= set(columns)
    assert set(Task.__struct_fields__) - {"id"} <= set(columns)
    assert set(Segment.__struct_fields__) - {"policy", "sampling"} <= segment
    assert set(Turn.__struct_fields__) == turn


def test_an_empty_directory_gives_an_empty_table(tmp_path: Path):
    (tmp_path / "data" / "log").mkdir(parents=True)
    assert export(tmp_path / "data", tmp_path / "out").exit_code == 0
    assert rows(tmp_path / "out") == []
    assert list(tables(headrace.open(tmp_path / "data").trajectories())) == []


def test_an_invalid_version_is_refused(stored: Path, tmp_path: Path):
    result = export(stored, tmp_path / "out", "--low", "seven")
    assert result.exit_code == 2
    assert "lineage.n" in result.stderr


def test_an_export_of_an_unknown_run_lists_the_known_runs(stored: Path, tmp_path: Path):
    result = export(stored, tmp_path / "out", "--run", "other-name")
    assert result.exit_code != 0
    assert "The run 'other-name' does not exist" in result.stderr
    assert f"Runs of {stored}: " in result.stderr


@pytest.mark.parametrize("criteria", [("--run", "other-name"), ("--tag", "hrad")])
def test_an_export_that_matches_nothing_leaves_no_folder(stored: Path, tmp_path: Path, criteria: tuple[str, ...]):
    assert "nothing was written" in export(stored, tmp_path / "out", *criteria).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert export(stored, tmp_path / "out", "--tag", "hard").exit_code == 0
    assert len(rows(tmp_path / "out")) == 1

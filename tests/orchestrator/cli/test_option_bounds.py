"""Options of commands whose value could not work are refused by the command line, with the range."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.errors import SetupError, StoreError
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.cli.app import cli
from tests.orchestrator.serving import orchestrator
from tests.orchestrator.small_disk import small_disk


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--slots", "99999999999"], "--slots"),
        (["up", "--workers", "100000"], "--workers"),
        (["up", "--data", ""], "it names no directory"),
        (["up", "--sandbox", "nope"], "No sandbox runtime is named 'nope'"),
        (["up", "--max-wait-s", "nan"], "not a finite number"),
        (["orchestrator", "--keep-age-s", "inf"], "--keep-age-s"),
        (["orchestrator", "--keep-bytes", str(2**63)], "--keep-bytes"),
        (["worker", "--slots", "99999999999"], "--slots"),
        (["worker", "--grace-s", "nan"], "not a finite number"),
        (["top", "--interval", "inf"], "--interval"),
        (["trajectories", "list", "run", "--limit", str(10**20)], "--limit"),
    ],
)
def test_a_value_that_could_not_work_is_refused_by_the_command_line(arguments: list[str], named: str) -> None:
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 2
    assert named in refused.output


def test_a_token_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "é")
    refused = CliRunner().invoke(cli, ["runs"])
    assert refused.exit_code == 1
    assert "other than ASCII" in refused.output


async def test_an_export_into_its_own_data_directory_is_refused(data_dir: Path) -> None:
    async with orchestrator(data_dir) as api:
        await api.create_run()
    for inside in (data_dir, data_dir / "log" / "out"):
        refused = CliRunner().invoke(cli, ["export", str(data_dir), str(inside), "--format", "jsonl"])
        assert refused.exit_code == 1
        assert "inside of the data directory" in refused.output


async def test_a_start_on_a_disk_with_little_space_left_ends_with_a_typed_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mib=1) as disk:
        (disk / "filler").write_bytes(bytes((1 << 20) - (64 << 10)))
        with pytest.raises((StoreError, SetupError)):
            async with orchestrator(disk / "data"):
                raise AssertionError("it started")


def test_a_projection_that_cannot_be_opened_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        SqliteProjection(tmp_path / "missing" / "projection.sqlite", "log")


@pytest.mark.parametrize("command", [["fsck"], ["export", "--format", "jsonl"]])
def test_a_folder_of_other_files_is_not_taken_for_a_data_directory(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "other" / "log").mkdir(parents=True)
    (tmp_path / "other" / "log" / "00000001.log").write_bytes(b"notes")
    name, *options = command
    destination = [str(tmp_path / "out")] if name == "export" else []
    refused = CliRunner().invoke(cli, [name, str(tmp_path / "other"), *destination, *options])
    assert refused.exit_code == 1
    assert "begins like a log" in refused.output
    assert not (tmp_path / "out").exists()

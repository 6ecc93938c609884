"""Data of an earlier version are served as that version served them, and the runs continue."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.learner import State, fetch, load
from headrace import Client, Version
from headrace.store import log_files
from headrace.store.log_format import HEADER_BYTES, FrameType, frame_bytes
from tests.compatibility.conftest import EarlierData
from tests.compatibility.http_worker import request_bytes
from tests.compatibility.orchestrator_process import HEADRACE, Orchestrator
from tests.compatibility.summary import differences, redelivered, served
from tests.e2e.processes import Processes, answers, free_port, wait_for

CHANGED = (".runs.nim.groups[0].", ".runs.nim.status.groups.")
"""Responses that differ on purpose: a group of 0.1.0 with a member without a row now waits for another member."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path / "logs") as running:
        yield running


def test_a_service_responds_as_the_earlier_version_did(earlier: EarlierData, data: Path, processes: Processes) -> None:
    orchestrator = Orchestrator(processes, data)
    orchestrator.start()
    assert _unmeant(earlier.expected["data"]["served"], served(orchestrator.url, earlier.data)) == []
    assert _damaged(orchestrator) == 0


def test_open_batches_are_redelivered_with_the_same_bytes_and_acked(
    earlier: EarlierData, data: Path, processes: Processes
) -> None:
    expected = earlier.expected["data"]["redelivered"]
    assert expected["trainer"]["batches"]
    assert expected["ranks"]["batches"]
    orchestrator = Orchestrator(processes, data)
    orchestrator.start()
    assert differences(expected, redelivered(orchestrator.url)) == []
    with Client(orchestrator.url, learner="trainer", session="after", keepalive=False) as learner:
        (batch,) = learner.resume("guess").batches
        version = Version(batch.version.lineage, Version.parse(learner.run("guess").version).n + 1)
        learner.ack(batch, version=version)
        assert learner.run("guess").version == str(version)


def test_a_worker_continues_the_run_and_new_batches_are_formed(
    earlier: EarlierData, data: Path, processes: Processes
) -> None:
    orchestrator, policy = Orchestrator(processes, data), f"http://127.0.0.1:{free_port()}"
    orchestrator.start()
    processes.add("policy", "tiny-policy", "--port", policy.rpartition(":")[2], python=str(HEADRACE)).start()
    wait_for("the policy server is ready", lambda: answers(f"{policy}/health"))
    stored = {trajectory["id"] for trajectory in earlier.expected["data"]["stored"]["trajectories"]}
    with Client(orchestrator.url, learner="trainer", session="after", keepalive=False) as learner:
        load(policy, State(fetch(policy).weights, Version.parse(learner.run("guess").version), ""))
        worker = ("worker", "--orchestrator", orchestrator.url, "--name", "default-3", "--policy-endpoint", policy)
        processes.add("worker", *worker, python=str(HEADRACE)).start()
        while True:
            batch = learner.pull("guess", timeout_s=60)
            if not stored.issuperset(batch.manifest.trajectories):
                break
            learner.ack(batch)
        batch.verify()


def test_a_deleted_projection_is_rebuilt(earlier: EarlierData, data: Path, processes: Processes) -> None:
    rows = _rows(data)
    (data / "projection.sqlite").unlink()
    orchestrator = Orchestrator(processes, data)
    orchestrator.start()
    assert _unmeant(earlier.expected["data"]["served"], served(orchestrator.url, earlier.data)) == []
    orchestrator.end()
    assert _rows(data) == rows


def test_the_log_alone_restores_the_state_if_no_control_state_can_be_read(
    earlier: EarlierData, data: Path, processes: Processes
) -> None:
    for number in log_files.numbers_in(data / "log")[1:]:
        path = log_files.path_of(data / "log", number)
        _damage_state(path)
        assert log_files.head_of(path) is None
    orchestrator = Orchestrator(processes, data)
    orchestrator.start()
    assert _unmeant(earlier.expected["data"]["served"], served(orchestrator.url, earlier.data)) == []


def test_a_backup_is_restored_and_served(earlier: EarlierData, tmp_path: Path, processes: Processes) -> None:
    subprocess.run([HEADRACE, "restore", earlier.backup, tmp_path / "data"], check=True, capture_output=True)
    orchestrator = Orchestrator(processes, tmp_path / "data")
    orchestrator.start()
    assert _unmeant(earlier.expected["backup"]["served"], served(orchestrator.url, earlier.backup)) == []
    assert differences(earlier.expected["backup"]["redelivered"], redelivered(orchestrator.url)) == []
    assert _damaged(orchestrator) == 0


def test_a_backup_copies_only_new_data(earlier: EarlierData, tmp_path: Path) -> None:
    backup = shutil.copytree(earlier.backup, tmp_path / "backup")
    process = subprocess.run([HEADRACE, "backup", earlier.data, backup, "--json"], check=True, capture_output=True)
    report = json.loads(process.stdout)
    assert (report["files"], report["copied_files"], report["copied_assets"]) == (3, 1, 0)


def _unmeant(expected: Any, found: Any) -> list[str]:
    """The differences of responses from those of the earlier version that are not meant to be there."""
    return [difference for difference in differences(expected, found) if not difference.startswith(CHANGED)]


def _damaged(orchestrator: Orchestrator) -> float:
    text = request_bytes("GET", f"{orchestrator.url}/metrics").decode()
    (value,) = re.findall(r"^headrace_log_damaged_records_total (\S+)$", text, re.MULTILINE)
    return float(value)


def _rows(data: Path) -> dict[str, list[tuple]]:
    with closing(sqlite3.connect(data / "projection.sqlite")) as database:
        tables = ("trajectories", "batches", "batch_members", "asset_references")
        return {table: sorted(database.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables}


def _damage_state(path: Path) -> None:
    """Flip a bit in both copies of a file's head."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(HEADER_BYTES)[12:20], "little")
        for copy in (0, frame_bytes(FrameType.FILE_HEAD, length) // 2):
            file.seek(copy + HEADER_BYTES + length // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

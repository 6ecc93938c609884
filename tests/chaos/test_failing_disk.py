"""A disk that is full, read-only, or failing for a while.

* Clients get a typed error that names the problem; nothing is acknowledged that is not stored.
* Nothing new is admitted; finished records wait in the spools of workers.
* When the disk accepts data again, the service continues without a restart, and nothing is lost.
* A start on a disk that accepts no data ends with one error message.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from headrace import Client
from headrace.errors import HeadraceError, StoreError, Unavailable
from tests.chaos.campaign import SPEC
from tests.chaos.checker import check
from tests.chaos.disk import cut_power
from tests.e2e.processes import Process, Processes, answers, free_port, wait_for
from tests.e2e.recorder import Recorder
from tests.orchestrator.small_disk import small_disk

DISK_MIB = 6
BALLAST_BYTES = 4 << 20
"""Size of a file that fills most of the small disk until it is removed."""


class ChaosDeployment(NamedTuple):
    """A service in a folder, a recording proxy in front of it, and the processes of the test."""

    folder: Path
    data: Path
    processes: Processes
    orchestrator: Process
    recorder: Recorder

    @property
    def url(self) -> str:
        return self.recorder.upstream

    def start(self, *roles: str) -> None:
        """Start the orchestrator with a run in it, then a process of each role."""
        self.orchestrator.start()
        self.wait_until_ready()
        with Client(self.url, keepalive=False) as client:
            client.create_run(SPEC, exist_ok=True)
        for role in roles:
            process(self.processes, role, self.folder, self.recorder.url).start()

    def wait_until_ready(self) -> None:
        wait_for("the orchestrator is ready", lambda: answers(f"{self.url}/readyz"))

    def pull_error(self) -> HeadraceError:
        """The error of a pull now; of a second one, because the first may come at the moment of the failure."""
        with Client(self.url, keepalive=False, retry_for_s=0) as client:
            with pytest.raises((StoreError, Unavailable)):
                client.pull("run", timeout_s=20)
            with pytest.raises(Unavailable) as caught:
                client.pull("run", timeout_s=20)
        return caught.value

    def wait_for_more(self, kind: str) -> None:
        """Wait until more is acknowledged of a kind, such as ``records``."""
        before = len(getattr(self.recorder.acknowledged, kind))
        wait_for(f"more {kind}", lambda: len(getattr(self.recorder.acknowledged, kind)) > before)

    def assert_nothing_is_lost(self, *, power_cut: bool = False) -> None:
        """Kill all processes, start again, and check that all acknowledged data is stored once."""
        for process in self.processes.all:
            process.kill()
        if power_cut:
            cut_power(self.data, self.folder / "synced", Random(1))
        self.orchestrator.start()
        self.wait_until_ready()
        assert check(self.url, "run", self.data, self.recorder.acknowledged, finished=False).violations == []


def process(processes: Processes, role: str, folder: Path, url: str) -> Process:
    return processes.add(role, "-m", "tests.chaos.run_role", role, str(folder), role, url)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[ChaosDeployment]:
    """A service on a disk that fails while the file ``fail-syncs`` exists."""
    with Recorder(f"http://127.0.0.1:{free_port()}") as recorder, Processes(tmp_path / "logs") as processes:
        orchestrator = process(processes, "orchestrator", tmp_path, recorder.upstream)
        yield ChaosDeployment(tmp_path, tmp_path / "data", processes, orchestrator, recorder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few mebibytes."""
    with small_disk(tmp_path / "disk", mib=DISK_MIB) as folder:
        yield folder


@pytest.fixture
def on_small_disk(disk: Path, at: ChaosDeployment) -> ChaosDeployment:
    """A service without injected failures, with its data on the small disk."""
    port = urlsplit(at.url).port
    assert port is not None
    return at._replace(data=disk / "data", orchestrator=at.processes.orchestrator(disk / "data", port))


def test_a_full_disk_stops_admission_and_free_space_resumes_everything(
    disk: Path, on_small_disk: ChaosDeployment
) -> None:
    at, acknowledged = on_small_disk, on_small_disk.recorder.acknowledged
    (disk / "ballast").write_bytes(bytes(BALLAST_BYTES))
    at.start("worker", "learner")
    wait_for("the disk is full", lambda: not answers(f"{at.url}/readyz"))
    assert at.pull_error().extra["phase"] == "disk full"
    before = len(acknowledged.granted), len(acknowledged.records), len(acknowledged.acks)
    assert at.pull_error().extra["phase"] == "disk full"
    assert (len(acknowledged.granted), len(acknowledged.records), len(acknowledged.acks)) == before
    (disk / "ballast").unlink()
    at.wait_until_ready()
    at.wait_for_more("records")
    at.wait_for_more("acks")
    at.assert_nothing_is_lost()


def test_a_start_on_a_full_disk_ends_with_one_error_message(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(2 * DISK_MIB << 20))
    finished = run_orchestrator(disk / "data")
    assert finished.returncode != 0
    assert "No space left on device" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_start_on_a_read_only_directory_ends_with_one_error_message(disk: Path) -> None:
    (disk / "data").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    finished = run_orchestrator(disk / "data")
    assert finished.returncode != 0
    assert "Read-only file system" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_sync_that_fails_acknowledges_nothing_and_a_power_cut_after_it_loses_nothing(at: ChaosDeployment) -> None:
    acknowledged = at.recorder.acknowledged
    at.start("worker", "learner")
    at.wait_for_more("acks")
    (at.folder / "fail-syncs").touch()
    wait_for("the disk fails", lambda: not answers(f"{at.url}/readyz"))
    assert "input/output error" in at.pull_error().extra["phase"].lower()
    before = len(acknowledged.granted), len(acknowledged.records), len(acknowledged.acks)
    at.pull_error()
    assert (len(acknowledged.granted), len(acknowledged.records), len(acknowledged.acks)) == before
    (at.folder / "fail-syncs").unlink()
    at.wait_until_ready()
    at.wait_for_more("acks")
    at.assert_nothing_is_lost(power_cut=True)


def run_orchestrator(data: Path) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", "orchestrator", "--data", str(data), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

"""A disk that takes no more: full, read-only, or broken for a while.

* Who asks is told what is wrong, in a typed error that names it; nothing is acknowledged that is not true.
* Nothing new is admitted; what workers have finished waits in their spools.
* When the disk takes data again the service goes on, without a restart and with nothing lost.
* A start on a disk that takes nothing ends with a sentence.
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
"""Takes most of the small disk, until it is removed."""


class Stage(NamedTuple):
    """A service in a folder, a proxy that records before it, and room for more processes."""

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
        self.ready()
        with Client(self.url, keepalive=False) as client:
            client.create_run(SPEC, exist_ok=True)
        for role in roles:
            process(self.processes, role, self.folder, self.recorder.url).start()

    def ready(self) -> None:
        wait_for("the orchestrator is ready", lambda: answers(f"{self.url}/readyz"))

    def refused(self) -> HeadraceError:
        """What a pull is told now; the second one, for the first may meet the very moment."""
        with Client(self.url, keepalive=False, retry_for_s=0) as client:
            with pytest.raises((StoreError, Unavailable)):
                client.pull("run", timeout_s=20)
            with pytest.raises(Unavailable) as told:
                client.pull("run", timeout_s=20)
        return told.value

    def grows(self, what: str) -> None:
        """Wait for more of what is acknowledged."""
        known = len(getattr(self.recorder.seen, what))
        wait_for(f"more {what}", lambda: len(getattr(self.recorder.seen, what)) > known)

    def assert_nothing_is_lost(self, *, power_cut: bool = False) -> None:
        """After the end of all and a start, everything acknowledged is there once."""
        for process in self.processes.all:
            process.kill()
        if power_cut:
            cut_power(self.data, self.folder / "vault", Random(1))
        self.orchestrator.start()
        self.ready()
        assert check(self.url, "run", self.data, self.recorder.seen, finished=False).wrong == []


def process(processes: Processes, role: str, folder: Path, url: str) -> Process:
    return processes.add(role, "-m", "tests.chaos.serve", role, str(folder), role, url)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Stage]:
    """A service on the disk that refuses while the file ``refuse`` is there."""
    with Recorder(f"http://127.0.0.1:{free_port()}") as recorder, Processes(tmp_path / "logs") as processes:
        orchestrator = process(processes, "orchestrator", tmp_path, recorder.upstream)
        yield Stage(tmp_path, tmp_path / "data", processes, orchestrator, recorder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few mebibytes."""
    with small_disk(tmp_path / "disk", mib=DISK_MIB) as folder:
        yield folder


@pytest.fixture
def on_small_disk(disk: Path, at: Stage) -> Stage:
    """The orchestrator as it is, with its data on the small disk."""
    port = urlsplit(at.url).port
    assert port is not None
    return at._replace(data=disk / "data", orchestrator=at.processes.orchestrator(disk / "data", port))


def test_a_full_disk_stops_admission_and_space_brings_everything_back(disk: Path, on_small_disk: Stage) -> None:
    at, seen = on_small_disk, on_small_disk.recorder.seen
    (disk / "ballast").write_bytes(bytes(BALLAST_BYTES))
    at.start("worker", "learner")
    wait_for("the disk is full", lambda: not answers(f"{at.url}/readyz"))
    assert at.refused().extra["phase"] == "disk full"
    before = len(seen.granted), len(seen.records), len(seen.acks)
    assert at.refused().extra["phase"] == "disk full"
    assert (len(seen.granted), len(seen.records), len(seen.acks)) == before
    (disk / "ballast").unlink()
    at.ready()
    at.grows("records")
    at.grows("acks")
    at.assert_nothing_is_lost()


def test_a_start_on_a_full_disk_ends_with_a_sentence(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(2 * DISK_MIB << 20))
    ended = start_of_orchestrator(disk / "data")
    assert ended.returncode != 0
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_start_on_a_read_only_directory_ends_with_a_sentence(disk: Path) -> None:
    (disk / "data").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    ended = start_of_orchestrator(disk / "data")
    assert ended.returncode != 0
    assert "Read-only file system" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_sync_that_fails_acknowledges_nothing_and_a_power_cut_after_it_loses_nothing(at: Stage) -> None:
    seen = at.recorder.seen
    at.start("worker", "learner")
    at.grows("acks")
    (at.folder / "refuse").touch()
    wait_for("the disk refuses", lambda: not answers(f"{at.url}/readyz"))
    assert "input/output error" in at.refused().extra["phase"].lower()
    before = len(seen.granted), len(seen.records), len(seen.acks)
    at.refused()
    assert (len(seen.granted), len(seen.records), len(seen.acks)) == before
    (at.folder / "refuse").unlink()
    at.ready()
    at.grows("acks")
    at.assert_nothing_is_lost(power_cut=True)


def start_of_orchestrator(data: Path) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", "orchestrator", "--data", str(data), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

"""Ownership of a data directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.errors import DataDirectoryInUse, SetupError
from headrace_orchestrator.buffer.data_directory import LOCK_TRIES, DataDirectory, is_owned, lock_directory


def test_one_orchestrator_writes_a_data_directory_and_a_second_one_is_refused(data_dir: Path):
    owner = DataDirectory.claim(data_dir)
    with pytest.raises(DataDirectoryInUse) as caught:
        DataDirectory.claim(data_dir)
    assert str(os.getpid()) in caught.value.detail
    assert caught.value.extra["pid"] == os.getpid()
    owner.close()
    DataDirectory.claim(data_dir).close()


def test_the_epoch_grows_at_every_start_and_is_on_disk_before_anything_is_answered(data_dir: Path):
    for expected in (1, 2, 3):
        directory = DataDirectory.claim(data_dir)
        assert directory.epoch == expected
        assert int((data_dir / "epoch").read_text()) == expected
        assert json.loads((data_dir / "owner").read_text()) == {"pid": os.getpid(), "epoch": expected}
        directory.close()


def test_a_refused_claim_does_not_use_up_an_epoch(data_dir: Path):
    owner = DataDirectory.claim(data_dir)
    with pytest.raises(DataDirectoryInUse):
        DataDirectory.claim(data_dir)
    owner.close()
    again = DataDirectory.claim(data_dir)
    assert again.epoch == 2
    again.close()


def test_the_lock_is_released_when_the_owner_ends_however_it_ends(data_dir: Path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from headrace_orchestrator.buffer.data_directory import DataDirectory\n"
        "DataDirectory.claim(Path(sys.argv[1])); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, data_dir], check=False).returncode == -9
    again = DataDirectory.claim(data_dir)
    assert again.epoch == 2
    again.close()


@pytest.fixture(params=["reaped", "not yet reaped"])
def left(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[Left]:
    """A process that writes for an owner that was killed."""
    code = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "from headrace_orchestrator.buffer.data_directory import DataDirectory\n"
        "lock = DataDirectory.claim(Path(sys.argv[1])).lock\n"
        "beside = [sys.executable, '-c', 'import sys; sys.stdin.read()']\n"
        "subprocess.Popen(beside, pass_fds=[lock]); os.kill(os.getpid(), 9)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, data_dir], stdin=subprocess.PIPE)
    assert owner.stdin is not None
    with owner.stdin as until_closed:
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        if request.param == "reaped":
            assert owner.wait(30) == -9
        yield Left(owner.pid, until_closed.close)
    owner.wait(30)


class Left(NamedTuple):
    """The owner's process id, and a callable that ends the process."""

    owner: int
    end: Callable[[], None]


def test_a_start_right_after_the_end_of_an_owner_waits_for_processes_that_write_for_it(
    data_dir: Path, left: Left, monkeypatch: pytest.MonkeyPatch
):
    sleep, slept = time.sleep, []

    def slept_for(duration_s: float) -> None:
        slept.append(duration_s)
        if len(slept) == 2 * LOCK_TRIES:
            left.end()
        sleep(duration_s)

    monkeypatch.setattr(time, "sleep", slept_for)
    again = DataDirectory.claim(data_dir)
    assert len(slept) >= 2 * LOCK_TRIES
    assert again.epoch == 2
    again.close()


def test_a_process_that_outlives_its_owner_keeps_the_directory(
    data_dir: Path, left: Left, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.data_directory.ENDED_OWNER_WAIT_S", 0.0)
    with pytest.raises(DataDirectoryInUse, match=f"its last orchestrator, process {left.owner}, has ended"):
        DataDirectory.claim(data_dir)


def test_an_owner_whose_lock_was_lost_to_another_process_notices_it_by_the_epoch(data_dir: Path):
    old = DataDirectory.claim(data_dir)
    old.ownership.require()
    (data_dir / "owner").unlink()
    new = DataDirectory.claim(data_dir)
    new.write_address("http://127.0.0.1:1")
    with pytest.raises(DataDirectoryInUse, match="of epoch 2; this one is of epoch 1"):
        old.ownership.require()
    old.close()
    assert (data_dir / "address").exists()
    new.ownership.require()
    new.close()


def test_a_damaged_epoch_is_not_guessed(data_dir: Path):
    DataDirectory.claim(data_dir).close()
    (data_dir / "epoch").write_text("x")
    with pytest.raises(SetupError, match="epoch"):
        DataDirectory.claim(data_dir)


def test_a_path_that_is_not_a_directory_is_refused_with_advice(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SetupError, match="may write"):
        DataDirectory.claim(file)


def test_a_lost_epoch_is_taken_from_the_owner_file(data_dir: Path):
    for _ in range(3):
        DataDirectory.claim(data_dir).close()
    (data_dir / "epoch").unlink()
    again = DataDirectory.claim(data_dir)
    assert again.epoch == 4
    again.close()


def test_a_lost_epoch_is_not_guessed(data_dir: Path):
    DataDirectory.claim(data_dir).close()
    (data_dir / "log").mkdir()
    (data_dir / "log" / "00000001.log").write_bytes(b"")
    for name in ("epoch", "owner"):
        (data_dir / name).unlink()
    with pytest.raises(SetupError, match="epoch"):
        DataDirectory.claim(data_dir)


def test_checking_for_an_owner_never_blocks_a_claim(data_dir: Path):
    assert not is_owned(data_dir)
    owner = DataDirectory.claim(data_dir)
    assert is_owned(data_dir)
    owner.close()
    assert not is_owned(data_dir)
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.001):
            is_owned(data_dir)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(50):
            DataDirectory.claim(data_dir).close()
    finally:
        stop.set()
        asking.join()


def test_a_locked_directory_cannot_be_claimed(data_dir: Path):
    DataDirectory.claim(data_dir).close()
    with lock_directory(data_dir), pytest.raises(DataDirectoryInUse):
        DataDirectory.claim(data_dir)
    DataDirectory.claim(data_dir).close()

"""The reaper removes what dead supervisors left, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace_sandbox.host import reaper
from headrace_sandbox.host.cgroups.cgroup import PARENT
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.host.supervisor import SUPERVISOR_VARIABLE, this_supervisor
from tests.sandbox.host.helpers import PROGRAMS, dead_supervisor, pids_of, supervisor_process, wait_for_exits
from tests.sandbox.test_cli import headrace


def groups_of(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/{PARENT}/{pid}-*"))


@pytest.mark.component("bubblewrap")
@pytest.mark.component("cgroups")
def test_control_groups_of_a_killed_supervisor_are_removed_and_those_of_a_living_one_are_not() -> None:
    dead, alive = secrets.token_hex(8), secrets.token_hex(8)
    with supervisor_process(alive) as living:
        with supervisor_process(dead) as killed:
            kept = groups_of(living.pid)
            assert kept
            assert groups_of(killed.pid)
            programs = [os.pidfd_open(pid) for pid in pids_of(dead)]
        assert len(programs) == PROGRAMS
        assert wait_for_exits(programs, timeout_s=20.0) == 0  # they die with it, before anything is reaped
        found = reap()
        assert found.left == []
        assert {Path(path).name.split("-")[0] for path in found.groups} >= {str(killed.pid)}
        assert groups_of(killed.pid) == []
        assert groups_of(living.pid) == kept
        assert len(pids_of(alive)) == PROGRAMS
    reap()


def test_a_process_that_holds_a_sandbox_for_a_dead_supervisor_is_killed(folder: Path) -> None:
    left = subprocess.Popen(["sleep", "300"], env={SUPERVISOR_VARIABLE: str(dead_supervisor())})
    other = subprocess.Popen(["sleep", "300"], env={SUPERVISOR_VARIABLE: str(this_supervisor())})
    try:
        assert left.pid in reap().processes
        assert left.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_folders_of_a_dead_supervisor_are_removed(folder: Path) -> None:
    for name in (f"{dead_supervisor()}-1", f"{this_supervisor()}-1", "somebody's"):
        (folder / "made" / name / "below").mkdir(parents=True)
    reap()
    assert {path.name for path in (folder / "made").iterdir()} == {f"{this_supervisor()}-1", "somebody's"}


def test_reapers_at_the_same_time_do_not_disturb_each_other(folder: Path) -> None:
    for number in range(50):
        (folder / "made" / f"{dead_supervisor()}-{number}" / "a" / "b").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        assert [found.left for found in pool.map(lambda _: reap(), range(4))] == [[]] * 4
    assert list((folder / "made").iterdir()) == []


def test_a_group_that_is_removed_while_it_is_read_is_not_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_group(path: str) -> Iterator[int]:
        raise OSError(errno.ENODEV, "No such device")  # the kernel's answer for a group that was removed meanwhile

    name = f"4194304-1-{this_supervisor().namespace}"
    monkeypatch.setattr(reaper, "list_group", list_group)
    monkeypatch.setattr(reaper, "_supervisor_groups", lambda root: iter([folder / name]))
    assert reap().left == []


def test_the_command_reap_reports_what_it_removed(folder: Path) -> None:
    (folder / "made" / f"{dead_supervisor()}-1").mkdir(parents=True)
    printed = headrace("reap", "--json")
    assert printed.returncode == 0, printed.stderr
    assert len(json.loads(printed.stdout)["folders"]) == 1

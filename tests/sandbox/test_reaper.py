"""What a killed supervisor left is found by the next one, and nothing else is touched."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host import owner as supervisors
from headrace_sandbox.host import reaper
from headrace_sandbox.host.cgroups import PARENT
from headrace_sandbox.host.owner import Supervisor, UserIds, is_dead, me, named
from headrace_sandbox.host.reaper import reap
from tests.sandbox.test_cli import headrace

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes users of their own")

SUPERVISOR = """
import asyncio, os
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Command
from headrace_sandbox.runtimes.bubblewrap.runtime import Bubblewrap

async def main():
    runtime = Bubblewrap()
    command = Command(arguments=["bash", "-c", "echo; exec -a $0 sleep 300", os.environ["MARK"]])
    await asyncio.gather(*(runtime.run(command, Limits(wall_s=300)) for _ in range(4)))

asyncio.run(main())
"""
"""Holds four sandboxes."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv(supervisors.FOLDER_VARIABLE, str(tmp_path / "state"))
    return supervisors.state_folder()


@pytest.fixture
def own_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """User ids that no supervisor of this machine takes: what runs under those that are taken is killed."""
    monkeypatch.setattr(supervisors, "FIRST_UID", 0x70000000)


@contextlib.contextmanager
def supervisor(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env={**os.environ, "MARK": mark})
    try:
        eventually(lambda: running(mark) == 4)
        yield process
    finally:
        process.kill()
        process.wait()


def eventually(holds: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(mark: str) -> int:
    """How many programs run under this name."""
    found = 0
    for pid in supervisors.pids():
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(mark.encode())
    return found


def name_of(pid: int) -> str:
    """Of the program that a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def groups_of(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/{PARENT}/{pid}-*"))


def someone_dead() -> Supervisor:
    process = subprocess.Popen(["true"])
    process.wait()
    return me()._replace(pid=process.pid, began=1)


def test_a_process_id_that_was_given_again_is_another_supervisor() -> None:
    assert not is_dead(me())
    assert is_dead(me()._replace(began=me().began - 1))
    assert named(f"{me()}-17") == me()
    assert named("17-3") is None


def test_of_supervisors_in_another_namespace_nothing_is_claimed() -> None:
    assert not is_dead(someone_dead()._replace(namespace=1))


def test_a_killed_supervisor_that_nobody_waited_for_is_dead() -> None:
    process = subprocess.Popen(["sleep", "300"])
    it = me()._replace(pid=process.pid, began=supervisors._began(process.pid) or 0)
    assert not is_dead(it)
    process.kill()
    eventually(lambda: is_dead(it))
    process.wait()


@pytest.mark.component("bubblewrap")
@pytest.mark.component("cgroups")
def test_control_groups_of_a_killed_supervisor_are_removed_and_those_of_a_living_one_are_not() -> None:
    dead, alive = secrets.token_hex(8), secrets.token_hex(8)
    with supervisor(alive) as living:
        with supervisor(dead) as killed:
            kept = groups_of(living.pid)
            assert kept
            assert groups_of(killed.pid)
        eventually(lambda: not running(dead))  # they die with it, before anything is reaped
        found = reap()
        assert found.left == []
        assert {Path(path).name.split("-")[0] for path in found.groups} >= {str(killed.pid)}
        assert groups_of(killed.pid) == []
        assert groups_of(living.pid) == kept
        assert running(alive) == 4
    reap()


def test_a_process_that_holds_a_sandbox_for_a_dead_supervisor_is_killed(folder: Path) -> None:
    dead = someone_dead()
    left = subprocess.Popen(["sleep", "300"], env={supervisors.VARIABLE: str(dead)})
    other = subprocess.Popen(["sleep", "300"], env={supervisors.VARIABLE: str(me())})
    try:
        assert left.pid in reap().processes
        assert left.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_folders_of_a_dead_supervisor_are_removed(folder: Path) -> None:
    for name in (f"{someone_dead()}-1", f"{me()}-1", "somebody's"):
        (folder / "made" / name / "below").mkdir(parents=True)
    reap()
    assert {path.name for path in (folder / "made").iterdir()} == {f"{me()}-1", "somebody's"}


def test_two_that_reap_at_once_do_not_trip_over_each_other(folder: Path) -> None:
    for number in range(50):
        (folder / "made" / f"{someone_dead()}-{number}" / "a" / "b").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        assert [found.left for found in pool.map(lambda _: reap(), range(4))] == [[]] * 4
    assert list((folder / "made").iterdir()) == []


def test_a_group_that_goes_while_it_is_read_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pids_in(path: Path) -> Iterator[int]:
        raise OSError(errno.ENODEV, "No such device")  # as the kernel says of a group that was removed meanwhile

    monkeypatch.setattr(reaper, "pids_in", pids_in)
    monkeypatch.setattr(reaper, "_groups", lambda root: iter([folder / f"4194304-1-{me().namespace}"]))
    assert reap().left == []


def test_reap_tells_what_it_removed(folder: Path) -> None:
    (folder / "made" / f"{someone_dead()}-1").mkdir(parents=True)
    told = headrace("reap", "--json")
    assert told.returncode == 0, told.stderr
    assert len(json.loads(told.stdout)["folders"]) == 1


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(open_to_all)
    for path in (open_to_all, tmp_path / "link", Path("/proc/no/such")):
        monkeypatch.setenv(supervisors.FOLDER_VARIABLE, str(path))
        with pytest.raises(SandboxFailure) as caught:
            supervisors.state_folder()
        assert caught.value.kind == "no-folder"


@pytest.mark.usefixtures("own_users")
def test_user_ids_of_two_supervisors_do_not_overlap(tmp_path: Path) -> None:
    first, second = UserIds(tmp_path), UserIds(tmp_path)
    assert abs(first._first - second._first) >= supervisors.UIDS
    for users in (first, second):
        os.close(users._lock)


@pytest.mark.usefixtures("own_users")
def test_a_range_of_a_dead_supervisor_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    held = os.open(tmp_path / "users" / "0", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = UserIds(tmp_path)
    assert second._first == supervisors.FIRST_UID + supervisors.UIDS
    os.close(held)  # as the kernel does when a process ends
    third = UserIds(tmp_path)
    assert third._first == supervisors.FIRST_UID
    for users in (second, third):
        os.close(users._lock)


@pytest.mark.usefixtures("own_users")
@as_root
def test_what_runs_under_a_range_that_is_taken_was_left_and_is_killed(tmp_path: Path) -> None:
    number = supervisors.RANGES - 1
    (tmp_path / "users").mkdir()
    with contextlib.ExitStack() as stack:
        for taken in range(number):
            file = stack.enter_context((tmp_path / "users" / str(taken)).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        user = supervisors.FIRST_UID + number * supervisors.UIDS + 5
        left = subprocess.Popen(["sleep", "300"], user=user, group=user, extra_groups=[])
        users = UserIds(tmp_path)
        assert left.wait(5) == -signal.SIGKILL
        with pytest.raises(SandboxFailure) as caught:
            UserIds(tmp_path)
        assert caught.value.kind == "too-many-supervisors"
        os.close(users._lock)


@pytest.mark.usefixtures("own_users")
def test_a_user_id_is_not_given_again_while_its_sandbox_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "UIDS", 2)
    users = UserIds(tmp_path)
    running = subprocess.Popen(["sleep", "300"])
    first = users.next()
    users.taken(first, running)
    assert users.next() == first + 1
    assert users.next() == first + 1
    running.kill()
    running.wait()
    assert users.next() == first
    os.close(users._lock)


@as_root
@pytest.mark.component("bubblewrap")
def test_a_program_whose_supervisor_dies_before_its_start_never_starts(tmp_path: Path) -> None:
    """The window in which bubblewrap does not yet end with its parent, held open by one that is slow."""
    real = subprocess.run(["which", "bwrap"], capture_output=True, text=True, check=True).stdout.strip()
    slow = tmp_path / "bwrap"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 1\nexec {real} "$@"\n')
    slow.chmod(0o755)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)  # it is run as the sandbox's user
    mark = secrets.token_hex(8)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MARK": mark}
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env=environment)
    try:
        it = me()._replace(pid=process.pid, began=supervisors._began(process.pid) or 0)
        eventually(lambda: any(holder == it for _, holder in supervisors.holders()))
    finally:
        process.kill()
        process.wait()
    assert [pid for pid, holder in supervisors.holders() if holder == it]
    eventually(lambda: {name_of(pid) for pid, holder in supervisors.holders() if holder == it} <= {"bwrap"})
    for _ in range(50):
        assert not running(mark)
        time.sleep(0.01)
    reap()
    assert not [pid for pid, holder in supervisors.holders() if holder == it]

"""User ids: a range for each supervisor, and a user id for each sandbox."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host import user_ids
from headrace_sandbox.host.user_ids import UserIds
from tests.sandbox.host.helpers import as_root


@pytest.fixture(autouse=True)
def _own_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """User ids that no supervisor of this machine takes, because the processes under a taken range are killed."""
    monkeypatch.setattr(user_ids, "FIRST_UID", 0x70000000)


def test_user_ids_of_two_supervisors_do_not_overlap(tmp_path: Path) -> None:
    first, second = UserIds(tmp_path), UserIds(tmp_path)
    assert abs(first._first - second._first) >= user_ids.UIDS
    for users in (first, second):
        os.close(users._lock)


def test_the_range_of_a_dead_supervisor_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    held = os.open(tmp_path / "users" / "0", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = UserIds(tmp_path)
    assert second._first == user_ids.FIRST_UID + user_ids.UIDS
    os.close(held)  # as the kernel does when a process ends
    third = UserIds(tmp_path)
    assert third._first == user_ids.FIRST_UID
    for users in (second, third):
        os.close(users._lock)


@as_root
def test_processes_under_a_range_are_killed_when_a_supervisor_takes_it(tmp_path: Path) -> None:
    number = user_ids.RANGES - 1
    (tmp_path / "users").mkdir()
    with contextlib.ExitStack() as stack:
        for taken in range(number):
            file = stack.enter_context((tmp_path / "users" / str(taken)).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        user = user_ids.FIRST_UID + number * user_ids.UIDS + 5
        left = subprocess.Popen(["sleep", "300"], user=user, group=user, extra_groups=[])
        users = UserIds(tmp_path)
        assert left.wait(5) == -signal.SIGKILL
        with pytest.raises(SandboxFailure) as caught:
            UserIds(tmp_path)
        assert caught.value.kind == "too-many-supervisors"
        os.close(users._lock)


def test_a_user_id_is_used_again_only_after_its_sandbox_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_ids, "UIDS", 2)
    users = UserIds(tmp_path)
    holder = subprocess.Popen(["sleep", "300"])
    first = users.next_free()
    users.assign(first, holder)
    assert users.next_free() == first + 1
    assert users.next_free() == first + 1
    holder.kill()
    holder.wait()
    assert users.next_free() == first
    os.close(users._lock)

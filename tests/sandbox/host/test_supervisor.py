"""A supervisor's identity, its death, and its state folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host.processes import start_ticks
from headrace_sandbox.host.supervisor import FOLDER_VARIABLE, is_dead, parse_supervisor, state_folder, this_supervisor
from tests.sandbox.host.helpers import dead_supervisor


def test_a_process_that_gets_the_same_id_later_is_another_supervisor() -> None:
    this = this_supervisor()
    assert not is_dead(this)
    assert is_dead(this._replace(start_ticks=this.start_ticks - 1))
    assert parse_supervisor(f"{this}-17") == this
    assert parse_supervisor("17-3") is None


def test_nothing_is_claimed_about_supervisors_in_another_namespace() -> None:
    assert not is_dead(dead_supervisor()._replace(namespace=1))


def test_a_killed_supervisor_that_was_not_reaped_is_dead() -> None:
    process = subprocess.Popen(["sleep", "300"])
    supervisor = this_supervisor()._replace(pid=process.pid, start_ticks=start_ticks(process.pid) or 0)
    assert not is_dead(supervisor)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(supervisor)
    process.wait()


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(open_to_all)
    for path in (open_to_all, tmp_path / "link", Path("/proc/no/such")):
        monkeypatch.setenv(FOLDER_VARIABLE, str(path))
        with pytest.raises(SandboxFailure) as caught:
            state_folder()
        assert caught.value.kind == "no-folder"

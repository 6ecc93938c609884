"""A sandbox of bubblewrap whose supervisor dies before its program starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace_sandbox.host.processes import start_ticks
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.host.supervisor import sandbox_holders, this_supervisor
from tests.sandbox.host.helpers import SUPERVISOR, as_root, count_running, wait_until


def program_name(pid: int) -> str:
    """The name of the program that a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@as_root
@pytest.mark.component("bubblewrap")
def test_a_program_whose_supervisor_dies_before_its_start_never_starts(tmp_path: Path) -> None:
    """The window in which bubblewrap does not yet end with its parent is held open by a slow one."""
    real = subprocess.run(["which", "bwrap"], capture_output=True, text=True, check=True).stdout.strip()
    slow = tmp_path / "bwrap"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 1\nexec {real} "$@"\n')
    slow.chmod(0o755)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)  # the sandbox's user runs it
    mark = secrets.token_hex(8)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MARK": mark}
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env=environment)
    try:
        supervisor = this_supervisor()._replace(pid=process.pid, start_ticks=start_ticks(process.pid) or 0)
        wait_until(lambda: any(holder == supervisor for _, holder in sandbox_holders()))
    finally:
        process.kill()
        process.wait()

    def held_by() -> list[int]:
        return [pid for pid, holder in sandbox_holders() if holder == supervisor]

    assert held_by()
    wait_until(lambda: {program_name(pid) for pid in held_by()} <= {"bwrap"})
    for _ in range(50):
        assert not count_running(mark)
        time.sleep(0.01)
    reap()
    assert not held_by()

"""A sandbox of bubblewrap whose supervisor dies before its program starts."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_sandbox.host.processes import start_ticks
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.host.supervisor import Supervisor, sandbox_holders, this_supervisor
from tests.sandbox.host.helpers import PROGRAMS, SUPERVISOR, as_root, pids_of, wait_for_exits

PAUSED_BWRAP = """#!/bin/bash
[ "$1" = --version ] && exec {bwrap} "$@"
exec {{wait}}<{go} {{info}}>{report}
echo paused >&$info
cat <&$wait >/dev/null
exec {bwrap} --info-fd $info "$@"
"""
"""Reports that it was started, waits for the end of ``go``, and then becomes bubblewrap, which reports its child."""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that the user of a sandbox can read; pytest hides its own ones from other users."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def holders_for(supervisor: Supervisor) -> list[int]:
    return [pid for pid, holder in sandbox_holders() if holder == supervisor]


@as_root
@pytest.mark.component("bubblewrap")
def test_a_program_whose_supervisor_dies_before_its_start_never_starts(public_folder: Path) -> None:
    """The supervisor is killed while bubblewrap does not yet end with its parent."""
    report, go = public_folder / "report", public_folder / "go"
    for fifo in (report, go):
        os.mkfifo(fifo)
        fifo.chmod(0o666)
    paused = public_folder / "bwrap"
    paused.write_text(PAUSED_BWRAP.format(bwrap=shutil.which("bwrap"), report=report, go=go))
    paused.chmod(0o755)
    mark = secrets.token_hex(8)
    environment = {**os.environ, "PATH": f"{public_folder}:{os.environ['PATH']}", "MARK": mark}
    with open(report, "r+b", 0) as reports, open(go, "r+b", 0) as release:
        process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env=environment)
        try:
            supervisor = this_supervisor()._replace(pid=process.pid, start_ticks=start_ticks(process.pid) or 0)
            for _ in range(PROGRAMS):
                assert reports.readline() == b"paused\n"
        finally:
            process.kill()
            process.wait()
        assert len(holders_for(supervisor)) >= PROGRAMS
        release.close()
        made = 0
        while made < PROGRAMS:
            made += reports.readline().count(b"child-pid")
        holders = [os.pidfd_open(pid) for pid in holders_for(supervisor)]
        assert wait_for_exits(holders, timeout_s=1.0) == len(holders) > 0  # they still wait for the supervisor
        assert not pids_of(mark)
        reap()
        assert not holders_for(supervisor)

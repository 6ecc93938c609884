"""A sandbox of bubblewrap whose supervisor dies before its program starts."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
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


def holders_for(supervisor: Supervisor) -> list[int]:
    return [pid for pid, holder in sandbox_holders() if holder == supervisor]


@as_root
@pytest.mark.component("bubblewrap")
def test_a_program_whose_supervisor_dies_before_its_start_never_starts(tmp_path: Path) -> None:
    """The supervisor is killed while bubblewrap does not yet end with its parent."""
    report, go = tmp_path / "report", tmp_path / "go"
    for fifo in (report, go):
        os.mkfifo(fifo)
        fifo.chmod(0o666)
    paused = tmp_path / "bwrap"
    paused.write_text(PAUSED_BWRAP.format(bwrap=shutil.which("bwrap"), report=report, go=go))
    for path in (paused, tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)  # the sandbox's user runs it
    mark = secrets.token_hex(8)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MARK": mark}
    release = os.open(go, os.O_RDWR)
    with os.fdopen(os.open(report, os.O_RDWR), "rb", 0) as reports:
        process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env=environment)
        try:
            supervisor = this_supervisor()._replace(pid=process.pid, start_ticks=start_ticks(process.pid) or 0)
            for _ in range(PROGRAMS):
                assert reports.readline() == b"paused\n"
        finally:
            process.kill()
            process.wait()
            os.close(release)
        assert len(holders_for(supervisor)) >= PROGRAMS
        made = 0
        while made < PROGRAMS:
            made += b"child-pid" in reports.readline()
    holders = [os.pidfd_open(pid) for pid in holders_for(supervisor)]
    assert wait_for_exits(holders, timeout_s=0.5) == len(holders) > 0  # they still wait for the supervisor
    assert not pids_of(mark)
    reap()
    assert not holders_for(supervisor)

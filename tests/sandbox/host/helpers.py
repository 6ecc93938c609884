"""Helpers for tests of supervisors and their leftovers."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace_sandbox.host.processes import list_pids
from headrace_sandbox.host.supervisor import Supervisor, this_supervisor

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes users of their own")

PROGRAMS = 4

SUPERVISOR = f"""
import asyncio, os
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

feed = Capture.feed

def feed_and_report(self, data):
    feed(self, data)
    print(flush=True)

Capture.feed = feed_and_report

async def main():
    runtime = BubblewrapRuntime()
    script = "exec -a $0 bash -c 'trap : PIPE; echo; exec -a $0 sleep 300' $0"
    command = SandboxCommand(arguments=["bash", "-c", script, os.environ["MARK"]])
    await asyncio.gather(*(runtime.run(command, Limits(wall_s=300)) for _ in range({PROGRAMS})))

asyncio.run(main())
"""
"""The program of a supervisor that holds four sandboxes, and prints a line once each program runs."""


@contextlib.contextmanager
def supervisor_process(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor whose four programs run under this name."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        for _ in range(PROGRAMS):
            assert process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def pids_of(mark: str) -> list[int]:
    """The programs that run under this name."""
    pids = []
    for pid in list_pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(mark.encode()):
                pids.append(pid)
    return pids


def wait_for_exits(pidfds: Sequence[int], timeout_s: float) -> int:
    """Wait until these processes have ended, or the time is over; closes the descriptors. Returns the number of
    processes that still run."""
    poll = select.poll()
    running = set(pidfds)
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    while running and (events := poll.poll(timeout_s * 1000)):
        for pidfd, _ in events:
            poll.unregister(pidfd)
            running.discard(pidfd)
    for pidfd in pidfds:
        os.close(pidfd)
    return len(running)


def dead_supervisor() -> Supervisor:
    """A supervisor of this namespace that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return this_supervisor()._replace(pid=process.pid, start_ticks=1)

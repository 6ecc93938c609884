"""Helpers for tests of supervisors and of what they leave."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_sandbox.host.processes import list_pids
from headrace_sandbox.host.supervisor import Supervisor, this_supervisor

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes users of their own")

SUPERVISOR = """
import asyncio, os
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

async def main():
    runtime = BubblewrapRuntime()
    command = SandboxCommand(arguments=["bash", "-c", "echo; exec -a $0 sleep 300", os.environ["MARK"]])
    await asyncio.gather(*(runtime.run(command, Limits(wall_s=300)) for _ in range(4)))

asyncio.run(main())
"""
"""The program of a supervisor that holds four sandboxes."""


@contextlib.contextmanager
def supervisor_process(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor whose four programs run under this name."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env={**os.environ, "MARK": mark})
    try:
        wait_until(lambda: count_running(mark) == 4)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(holds: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count_running(mark: str) -> int:
    """The number of programs that run under this name."""
    found = 0
    for pid in list_pids():
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(mark.encode())
    return found


def dead_supervisor() -> Supervisor:
    """A supervisor of this namespace that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return this_supervisor()._replace(pid=process.pid, start_ticks=1)

"""Helpers for tests of persistent sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import SandboxCommand

LIMITS = Limits(wall_s=20.0)


def python(code: str) -> SandboxCommand:
    return SandboxCommand(arguments=["python3", "-I", "-c", code])


def output_of(result: ExecResult) -> str:
    assert (result.fault, result.stderr.text) == ("", "")
    return result.stdout.text


def detached(mark: str) -> str:
    """A shell command that starts a process in a session of its own, without the shell's output."""
    return f"setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1"


def pids_marked(mark: str) -> list[int]:
    """Processes of this machine with the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def pids_named(name: str) -> list[int]:
    """Processes of this machine that gave themselves this name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text() == f"{name}\n":
                found.append(int(folder.name))
    return found


async def wait_until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)

"""Finds, kills and waits for processes of this machine.

* A process is killed through its pidfd, which never refers to another process that got the same id.
* A wait for an end has a bound; a process that outlasts it is the failure ``unkillable``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.descriptors import is_readable, wait_readable

KILL_S = 5.0
"""Deadline for the end of a killed program; one that outlasts it is blocked in the kernel."""

KILL_ALL_S = 2.0
"""Deadline for the end of all processes that a search finds."""

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 8
"""The ioctl that describes the process of a pidfd, and the flag that requests its exit status."""

PROC = Path("/proc")


def list_pids() -> list[int]:
    """All processes that this process can see."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def start_ticks(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None if it does not run."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def kill_pidfd(pidfd: int) -> None:
    """Kill a process; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def was_killed_by_signal(pidfd: int) -> bool:
    """True if a signal ended this process, which has ended; False where the kernel does not say (before 6.15).

    bubblewrap's exit code is the same for a program that a signal ended and for its own process 1."""
    info = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return False
    mask, status = struct.unpack("=Q52xi", info)
    return bool(mask & PIDFD_INFO_EXIT) and os.WIFSIGNALED(status)


async def wait_for_exit(pidfd: int, within_s: float) -> None:
    """Wait for the end of a process; the end of a process 1 is the end of its whole namespace. Raises SandboxFailure
    ``unkillable``."""
    if is_readable(pidfd):
        return
    try:
        async with timeout(within_s):
            await wait_readable(pidfd)
    except TimeoutError:
        raise unkillable() from None


def kill_all(find: Callable[[], Iterable[int]]) -> list[int]:
    """Search and kill until the search finds nothing; returns the killed processes. Raises SandboxFailure
    ``unkillable``."""
    deadline = time.monotonic() + KILL_ALL_S
    killed: set[int] = set()
    while pids := set(find()):
        if time.monotonic() > deadline:
            raise processes_unkillable(sorted(pids))
        killed |= pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return sorted(killed)


def unkillable() -> SandboxFailure:
    """The failure of a program that SIGKILL does not end."""
    return SandboxFailure(
        f"The program was killed and did not end within {KILL_S:g} s.",
        hint="It is blocked in the kernel, most likely by a disk or a network file system.",
        kind="unkillable",
        retryable=True,
    )


def processes_unkillable(pids: list[int]) -> SandboxFailure:
    """The failure of several processes that SIGKILL does not end."""
    return SandboxFailure(
        f"Processes {pids} do not end, although they were killed.",
        hint="They are blocked in the kernel, most likely by a disk or a network file system.",
        kind="unkillable",
        retryable=True,
    )


def command_too_large() -> SandboxFailure:
    """The failure of a command that is larger than the kernel allows."""
    return SandboxFailure(
        "The arguments and variables are larger than the kernel allows for a program.",
        hint="One may have 128 KiB, all together 2 MiB. Pass large data in a file, or as standard input.",
        kind="command-too-large",
        retryable=False,
    )

"""A child process as the supervisor watches it, on every Unix: its end, its kill, what it used.

* It leads a process group, and is killed with all of it.
* It is not reaped before its end was told, so that its number stays its own while somebody may still kill it.
* What it used is what the kernel counted, for it and those of its children that it waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from headrace.errors import SandboxFailure
from headrace_sandbox.host.bwrap import taken, too_large
from headrace_sandbox.host.descriptors import piped
from headrace_sandbox.host.watch import Started

GONE_S = 5.0
"""For a killed process to be gone; one that is not waits in the kernel."""

LOOK_S = 0.005
"""Between looks whether it is gone."""


class Child:
    """A program that was started. ``started`` is for ``supervise``; leaving the context kills what is left."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, handed: Sequence[int] = ()
    ) -> None:
        """Start it in ``folder`` with three pipes and what is handed. Raises SandboxFailure ``sandbox-not-made``."""
        try:
            self.process = piped(arguments, env=environment, pass_fds=handed, start_new_session=True, cwd=folder)
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise too_large() from error
            raise SandboxFailure(
                f"{arguments[0]} could not be started: {error}.", kind="sandbox-not-made", retryable=True
            ) from error
        self._usage_s: float | None = None
        self.started = Started(
            stdin=taken(self.process.stdin),
            stdout=taken(self.process.stdout),
            stderr=taken(self.process.stderr),
            end=_end_of(self.process.pid),
            returncode=self.returncode,
            kill=self._kill,
            cpu_s=self.cpu_s,
        )

    def returncode(self) -> int:
        """How it ended, as ``subprocess`` has it; waits for that."""
        while not self._reap(0):
            pass
        assert self.process.returncode is not None
        return self.process.returncode

    def _reap(self, options: int) -> bool:
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, options)
            if pid:
                self._usage_s = usage.ru_utime + usage.ru_stime
                self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode is not None

    def cpu_s(self) -> float | None:
        """Its processor time, so far or at its end; None where this system cannot tell while it runs."""
        if self._usage_s is not None or sys.platform != "linux":
            return self._usage_s
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.process.pid << 3 | 2)  # the clock of a process, as Linux numbers it
        return None

    async def abandon(self) -> None:
        """End one that nobody supervises."""
        for descriptor in (self.started.stdin, self.started.stdout, self.started.stderr, self.started.end):
            os.close(descriptor)
        await self._end()

    def _kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of zombies
                os.killpg(self.process.pid, signal.SIGKILL)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """Kill it, and wait until it is gone: it may still write files. One that the kernel holds holds up nobody."""
        self._kill()
        until = time.monotonic() + GONE_S
        while not self._reap(os.WNOHANG):
            if time.monotonic() > until:
                threading.Thread(target=self.returncode, daemon=True).start()
                return
            await asyncio.sleep(LOOK_S)


def _end_of(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    if sys.platform == "linux":
        return os.pidfd_open(pid)
    queue = select.kqueue()
    exit_ = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    queue.control([exit_], 0)
    descriptor = os.dup(queue.fileno())
    queue.close()
    return descriptor

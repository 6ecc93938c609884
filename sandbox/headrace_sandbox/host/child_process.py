"""A child process that the supervisor watches, on every Unix: its end, its kill, its processor time.

* It leads a process group, and is killed with all of it.
* It is reaped only after its end was reported, so that its process id stays its own while it may still be killed.
* Its processor time is the kernel's count, for it and for those of its children that it waited for.
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
from headrace_sandbox.host.descriptors import detach_descriptor, popen_with_pipes
from headrace_sandbox.host.processes import KILL_S, command_too_large
from headrace_sandbox.host.watch import RunningProgram
from headrace_sandbox.host.work_time import look_at_descendants

POLL_S = 0.005
"""Interval of the checks for the end of a killed process."""


class ChildProcess:
    """A program that was started. ``program`` is for ``watch_program``; leaving the context kills the process group."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, passed_fds: Sequence[int] = ()
    ) -> None:
        """Start it in ``folder`` with three pipes and the descriptors ``passed_fds``. Raises SandboxFailure
        ``sandbox-not-made``."""
        try:
            self.process = popen_with_pipes(
                arguments, env=environment, pass_fds=passed_fds, start_new_session=True, cwd=folder
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise command_too_large() from error
            raise SandboxFailure(
                f"{arguments[0]} could not be started: {error}.", kind="sandbox-not-made", retryable=True
            ) from error
        self._usage_s: float | None = None
        self.program = RunningProgram(
            stdin=detach_descriptor(self.process.stdin),
            stdout=detach_descriptor(self.process.stdout),
            stderr=detach_descriptor(self.process.stderr),
            end=_exit_descriptor(self.process.pid),
            returncode=self.returncode,
            kill=self._kill,
            cpu_s=self.cpu_s,
            look=lambda: look_at_descendants(self.process.pid),
        )

    def returncode(self) -> int:
        """Wait for its end; returns its exit status as ``subprocess`` has it."""
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
        """The processor time of the process, so far or at its end; None while it runs on a system that does not report
        it."""
        if self._usage_s is not None or sys.platform != "linux":
            return self._usage_s
        with contextlib.suppress(OSError):
            return time.clock_gettime(~self.process.pid << 3 | 2)  # Linux's number for the clock of a process
        return None

    async def abandon(self) -> None:
        """End a program that is not watched."""
        for descriptor in (self.program.stdin, self.program.stdout, self.program.stderr, self.program.end):
            os.close(descriptor)
        await self._end()

    def _kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: zombies on macOS
                os.killpg(self.process.pid, signal.SIGKILL)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """Kill it and wait until it is gone, because it may still write files. A process that the kernel holds is
        reaped in a thread, without blocking the caller."""
        self._kill()
        until = time.monotonic() + KILL_S
        while not self._reap(os.WNOHANG):
            if time.monotonic() > until:
                threading.Thread(target=self.returncode, daemon=True).start()
                return
            await asyncio.sleep(POLL_S)


def _exit_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the process ends."""
    if sys.platform == "linux":
        return os.pidfd_open(pid)
    queue = select.kqueue()
    exit_ = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
    queue.control([exit_], 0)
    descriptor = os.dup(queue.fileno())
    queue.close()
    return descriptor

"""A program inside a persistent sandbox, as its init process reports it.

* Each has a process 1 of its own; when that ends, all that was started with it has ended.
* It runs only when it is bounded: a process that could not be bounded is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import NamedTuple

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import Cgroup
from headrace_sandbox.host.processes import kill_pidfd, wait_for_exit
from headrace_sandbox.runtimes.bubblewrap.admission import admit
from headrace_sandbox.runtimes.bubblewrap.credential_sockets import (
    open_pidfd,
    receive_with_sender,
    socket_pair_with_credentials,
)
from headrace_sandbox.runtimes.shared.exec_result import sandbox_lost

START_S = 10.0
"""Deadline for a program to report its start."""

END_S = 5.0
"""Deadline for the end of a killed process; one that outlasts it is blocked in the kernel."""

PROGRAM_END = struct.Struct("=II")
"""Wait status, and 1 if the scratch folder was full."""


class ProgramBounds(NamedTuple):
    """The bounds of all programs of a sandbox together: a control group, and the processors that they may use."""

    group: Cgroup
    processors: set[int] | None

    def admit(self, pid: int) -> None:
        """Bound a process and its later children; does nothing if it has ended. Raises OSError."""
        with contextlib.suppress(ProcessLookupError):
            admit(pid, self.group, self.processors)


class InnerProgram:
    """A program that an init process started, with a process 1 of its own. ``end`` is a descriptor that becomes
    readable when the program has ended, or no process is left to report its end; ``status`` is then its exit status, or
    None, and ``disk_full`` is True if it failed with a full scratch folder. ``goes_when_bounded``: its processes go on
    once they are bounded; else they wait for ``go``."""

    def __init__(self, ours: socket.socket, bounds: ProgramBounds, stack: contextlib.ExitStack) -> None:
        self.end = os.eventfd(0)
        self.status: int | None = None
        self.disk_full = False
        self.failure: SandboxFailure | None = None
        self.goes_when_bounded = False
        self._socket = ours
        self._bounds = bounds
        self._stack = stack
        self._loop = asyncio.get_running_loop()
        self._admission: asyncio.Task[None] | None = None
        self._first: asyncio.Future[int | None] = self._loop.create_future()
        self._bounded: asyncio.Future[bool | None] = self._loop.create_future()
        self._loop.add_reader(ours, self._receive)
        stack.callback(self._close)

    @classmethod
    def make(cls, bounds: ProgramBounds, stack: contextlib.ExitStack) -> tuple[InnerProgram, int]:
        """A new one, and the other end of its socket."""
        ours, theirs = socket_pair_with_credentials()
        try:
            return cls(ours, bounds, stack), theirs.detach()
        except BaseException:
            ours.close()
            theirs.close()
            raise

    async def wait_first_process(self) -> int:
        """Wait for its process 1, which waits for ``go``; returns a descriptor of it. Raises SandboxFailure
        ``sandbox-lost``."""
        with contextlib.suppress(TimeoutError):
            async with timeout(START_S):
                if (pidfd := await self._first) is not None:
                    return pidfd
        raise sandbox_lost("The sandbox was lost while a program started in it.")

    async def wait_bounded(self) -> None:
        """Wait until its program is bounded and waits for ``go``. Raises SandboxFailure ``sandbox-lost``."""
        with contextlib.suppress(TimeoutError):
            async with timeout(START_S):
                if await self._bounded:
                    return
        raise self.failure or sandbox_lost("The sandbox was lost while a program started in it.")

    def go(self) -> None:
        """Let the process that waits go on."""
        with contextlib.suppress(OSError):  # it has ended, which is noticed elsewhere
            self._socket.send(b"1")

    async def wait_for_exit(self) -> None:
        """Wait until all of its processes have ended. Raises SandboxFailure ``unkillable``."""
        pidfd = self._first.result()
        assert pidfd is not None
        await wait_for_exit(pidfd, END_S)

    def _receive(self) -> None:
        try:
            data, sender = receive_with_sender(self._socket, 16)
        except BlockingIOError:
            return
        if data == b"first" and not self._first.done():
            pidfd = open_pidfd(sender)
            if pidfd is not None:
                self._stack.callback(os.close, pidfd)
            self._first.set_result(pidfd)
        elif data == b"member":
            self._admission = self._loop.create_task(self._admit(sender))
        elif data == b"outside":
            self._refuse("it did not enter its control group")
        elif len(data) == PROGRAM_END.size:
            status, full = PROGRAM_END.unpack(data)
            self.status, self.disk_full = os.waitstatus_to_exitcode(status), bool(full)
            os.eventfd_write(self.end, 1)
        elif not data:
            self._loop.remove_reader(self._socket)
            for future in (self._first, self._bounded):
                if not future.done():
                    future.set_result(None)
            os.eventfd_write(self.end, 1)

    async def _admit(self, pid: int) -> None:
        try:
            if self._bounds.group.entries:
                self._bounds.admit(pid)
            else:
                await asyncio.to_thread(self._bounds.admit, pid)  # the kernel makes it wait
        except OSError as error:
            self._refuse(f"{error}")
            return
        if self.goes_when_bounded:
            self.go()
        elif not self._bounded.done():
            self._bounded.set_result(True)

    def _refuse(self, reason: str) -> None:
        """Kill a program that could not be bounded."""
        self.failure = sandbox_lost(f"A program could not be bounded: {reason}.")
        if (pidfd := self._first.result()) is not None:
            kill_pidfd(pidfd)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        os.close(self.end)

"""A slot of a fork server: forks one isolated child after the other, each of which waits for a program.

* The slot is in a control group, and forks its children there, so nothing has to be moved when a program comes.
* A child serves one program. The slot reports when the child and all that the program started are gone, and forks the
  next one.
* A slot and a waiting child run code of ours alone; no program can enter either.
* A program's end is reported by its process 1, over a socket that the program does not have.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.common.timeouts import timeout
from headrace_sandbox.host.cgroups.cgroup import Cgroup, look_at_group, no_cgroup
from headrace_sandbox.host.cgroups.pool import LEFT_BYTES
from headrace_sandbox.host.descriptors import Descriptors, is_readable, memory_file, wait_readable
from headrace_sandbox.host.processes import KILL_S, kill_pidfd, unkillable
from headrace_sandbox.host.watch import RunningProgram
from headrace_sandbox.result import Limits, Usage
from headrace_sandbox.runtimes.bubblewrap.credential_sockets import receive_with_sender, socket_pair_with_credentials
from headrace_sandbox.runtimes.shared.exec_result import sandbox_lost

START_S = 20.0
"""Deadline for a slot to start, and for a child to wait in it."""

OWN_PIDS = 1
"""Processes of a slot beside a child and its program: the slot itself."""

LARGE_BYTES = 32 << 20
"""A program that used more memory than this delays the next one until the memory is free again: the kernel frees files
in memory a little after the processes that had them."""

FREE_S, FREE_POLL_S = 5.0, 0.002
"""Deadline for memory to be freed, and the interval of the checks."""

MOST_BYTES = 1024
"""Largest packet of a slot or a child."""

SLOT_STARTED, CHILD_READY, CHILD_FAILED, PROGRAM_ENDED = b"s", b"r", b"f", b"e"
"""Packets of a slot and its children; see ``guest/fork_server.py``."""


class Slot:
    """A slot. Its life: ``make``; then ``wait_ready``, ``start``, ``wait_gone`` for one program after the other;
    ``close``."""

    def __init__(self, group: Cgroup) -> None:
        self.group = group
        self.used_at = 0.0
        self._socket, self._theirs = socket_pair_with_credentials()
        self._pid = 0
        self._pidfd = -1
        self._child = _ForkedProcess(0, -1)
        self._status: int | None = None
        self._disk_full = False
        self._is_gone = True
        self._was_large = False

    async def make(self, request_slot: Callable[[Sequence[int]], None]) -> None:
        """Have the server fork it, and put it into its group unless it enters by itself. Raises SandboxFailure."""
        with self._theirs, Descriptors() as owned:
            entries = (owned.own(os.open(path, os.O_WRONLY)) for path in self.group.entries)
            request_slot([self._theirs.fileno(), *entries])
        self._pid, self._pidfd = await self._expect(SLOT_STARTED)
        if not self.group.entries:
            try:
                await asyncio.to_thread(self.group.add, self._pid)
            except OSError as error:
                raise no_cgroup(error) from error
        self._socket.send(b"1")

    async def wait_ready(self, limits: Limits) -> None:
        """Wait for a waiting child, and bound it. Raises SandboxFailure if none comes."""
        if not self._child.pid:
            self._child = await self._expect(CHILD_READY)
        if is_readable(self._pidfd):
            raise sandbox_lost("A slot of the fork server was killed.")
        if self._was_large:
            await self._wait_memory_free()
        try:
            self.group.open(msgspec.structs.replace(limits, pids=limits.pids + OWN_PIDS))
        except OSError as error:
            raise no_cgroup(error) from error

    def start(self, request: bytes) -> RunningProgram:
        """Give a program to the waiting child. Raises SandboxFailure ``sandbox-lost``."""
        self._is_gone, self._status, self._disk_full = False, None, False
        with Descriptors() as owned:
            (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = owned.pipe(), owned.pipe(), owned.pipe()
            passed_fds = [stdin, stdout, stderr, owned.own(memory_file(request))]
            end = owned.own(os.dup(self._socket.fileno()))
            try:
                self._socket.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed_fds))])
            except OSError as error:
                raise sandbox_lost(f"The child in a slot accepts no program: {error}.") from error
            owned.release(our_stdin, our_stdout, our_stderr, end)
        return RunningProgram(
            stdin=our_stdin,
            stdout=our_stdout,
            stderr=our_stderr,
            end=end,
            returncode=self._returncode,
            kill=self._kill,
            cpu_s=lambda: self.group.usage().cpu_s,
            look=lambda: look_at_group(self.group, self._child.pid),
        )

    async def wait_gone(self) -> Usage:
        """Wait until every process of the program has ended; returns its usage. Raises SandboxFailure
        ``unkillable``."""
        while not self._is_gone:
            try:
                kind, data, _ = await self._next_packet(KILL_S)
            except TimeoutError:
                raise unkillable() from None
            self._handle(kind, data)
        usage = msgspec.structs.replace(self.group.usage(), disk_full=self._disk_full)
        self._was_large = (usage.peak_memory_bytes or 0) > LARGE_BYTES
        os.close(self._child.pidfd)
        self._child = _ForkedProcess(0, -1)
        return usage

    def close(self) -> None:
        """End it, and its child."""
        self._theirs.close()
        self._socket.close()
        for pidfd in (self._child.pidfd, self._pidfd):
            if pidfd >= 0:
                kill_pidfd(pidfd)
                os.close(pidfd)

    async def _wait_memory_free(self) -> None:
        until = time.monotonic() + FREE_S
        while (self.group.held_bytes() or 0) > LEFT_BYTES:
            if time.monotonic() > until:
                raise sandbox_lost("The kernel does not free the memory of the program before.")
            await asyncio.sleep(FREE_POLL_S)
        self._was_large = False

    def _kill(self) -> None:
        kill_pidfd(self._child.pidfd)

    def _returncode(self) -> int | None:
        """The exit status of the program; None if its process 1 was killed before it could report it."""
        with contextlib.suppress(BlockingIOError):
            kind, data, _ = self._packet()
            self._handle(kind, data)
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def _handle(self, kind: bytes, data: bytes) -> None:
        if kind == CHILD_FAILED:
            raise sandbox_lost(f"A child of the fork server could not be isolated: {data.decode(errors='replace')}.")
        if kind == PROGRAM_ENDED:
            self._status, full = struct.unpack("=II", data)
            self._disk_full = bool(full)
        else:  # also if the slot itself ended, and with it all of its children
            self._is_gone = True

    async def _expect(self, expected: bytes) -> _ForkedProcess:
        try:
            kind, _, pid = await self._next_packet(START_S)
        except TimeoutError:
            kind, pid = b"", 0
        if kind != expected or not pid:
            raise sandbox_lost("A slot of the fork server was lost.")
        with _os_errors_as_loss():
            return _ForkedProcess(pid, os.pidfd_open(pid))

    async def _next_packet(self, timeout_s: float) -> tuple[bytes, bytes, int]:
        """The next packet: its kind, its content, its sender. Raises TimeoutError."""
        with contextlib.suppress(BlockingIOError):
            return self._packet()
        async with timeout(timeout_s):
            await wait_readable(self._socket.fileno())
        return self._packet()

    def _packet(self) -> tuple[bytes, bytes, int]:
        packet, sender = receive_with_sender(self._socket, MOST_BYTES)
        return packet[:1], packet[1:], sender


class _ForkedProcess(NamedTuple):
    pid: int
    pidfd: int


@contextlib.contextmanager
def _os_errors_as_loss() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise sandbox_lost(f"A child of the fork server was lost: {error}.") from error

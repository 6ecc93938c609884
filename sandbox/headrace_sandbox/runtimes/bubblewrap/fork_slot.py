"""A slot of a fork server: where one isolated child after the other waits for a program, bounded already.

* The slot is in a control group, and forks its children there: nothing has to be moved when a program comes.
* A child serves one program. The slot says when it is gone, with all that the program started, and forks the next one.
* What a slot and a waiting child run is ours alone; a program gets into neither.
* How a program ended is told by its process 1, over a socket that the program does not have.
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
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.cgroups import LEFT_BYTES, Cgroup, no_cgroup
from headrace_sandbox.host.descriptors import Descriptors, is_readable
from headrace_sandbox.host.watch import KILL_S, Started, unkillable
from headrace_sandbox.result import Limits, Usage
from headrace_sandbox.runtimes.shared.outcome import sandbox_lost

MEET_S = 20.0
"""For a slot, and for the child that waits in it, to be there."""

OWN_PIDS = 1
"""Processes of a slot beside a child and its program: the slot itself."""

LARGE_BYTES = 32 << 20
"""After a program that used so much memory it is looked whether it is free again: the kernel gives back files in
memory a little after the processes that had them."""

FREE_S, FREE_LOOK_S = 5.0, 0.002
"""For memory to be given back, and between looks."""

MOST_BYTES = 1024
"""Of what they tell."""

THERE, READY, FAILED, ENDED = b"s", b"r", b"f", b"e"
"""What a slot and its children tell; see ``guest/fork_server.py``."""


class Slot:
    """One slot. Its life: ``make``; then ``ready``, ``start``, ``gone`` for one program after the other; ``close``."""

    def __init__(self, group: Cgroup) -> None:
        self.group = group
        self.used_at = 0.0
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._pid = 0
        self._pidfd = -1
        self._child = _Child(0, -1)
        self._status: int | None = None
        self._disk_full = False
        self._is_gone = True
        self._was_large = False

    async def make(self, ask: Callable[[Sequence[int]], None]) -> None:
        """Have it forked by asking for it, and be put into its group if it does not enter it. Raises SandboxFailure."""
        with self._theirs, Descriptors() as made:
            ask([self._theirs.fileno(), *(made.own(os.open(path, os.O_WRONLY)) for path in self.group.entries)])
        self._pid, self._pidfd = await self._expect(THERE)
        if not self.group.entries:
            try:
                await asyncio.to_thread(self.group.add, self._pid)
            except OSError as error:
                raise no_cgroup(error) from error
        self._socket.send(b"1")

    async def ready(self, limits: Limits) -> None:
        """Wait until a child waits, and bound it. Raises SandboxFailure if none does."""
        if not self._child.pid:
            self._child = await self._expect(READY)
        if is_readable(self._pidfd):
            raise sandbox_lost("A slot of the fork server was killed.")
        if self._was_large:
            await self._memory_free()
        try:
            self.group.open(msgspec.structs.replace(limits, pids=limits.pids + OWN_PIDS))
        except OSError as error:
            raise no_cgroup(error) from error

    def start(self, request: bytes) -> Started:
        """Hand a program to the child that waits. Raises SandboxFailure ``sandbox-lost``."""
        self._is_gone, self._status, self._disk_full = False, None, False
        with Descriptors() as made:
            (stdin, ours), (stdout, theirs), (stderr, theirs_too) = made.pipe(), made.pipe(), made.pipe()
            handed = [stdin, theirs, theirs_too, made.own(bwrap.memory_file(request))]
            end = made.own(os.dup(self._socket.fileno()))
            try:
                self._socket.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handed))])
            except OSError as error:
                raise sandbox_lost(f"The child in a slot takes no program: {error}.") from error
            made.give(ours, stdout, stderr, end)
        return Started(
            stdin=ours,
            stdout=stdout,
            stderr=stderr,
            end=end,
            returncode=self._returncode,
            kill=self._kill,
            cpu_s=lambda: self.group.usage().cpu_s,
        )

    async def gone(self) -> Usage:
        """Wait until nothing of the program is left; gives what it used. Raises SandboxFailure ``unkillable``."""
        while not self._is_gone:
            try:
                kind, data, _ = await self._next(KILL_S)
            except TimeoutError:
                raise unkillable() from None
            self._told(kind, data)
        usage = msgspec.structs.replace(self.group.usage(), disk_full=self._disk_full)
        self._was_large = (usage.peak_memory_bytes or 0) > LARGE_BYTES
        os.close(self._child.pidfd)
        self._child = _Child(0, -1)
        return usage

    def close(self) -> None:
        """End it, and what runs in it."""
        self._theirs.close()
        self._socket.close()
        for pidfd in (self._child.pidfd, self._pidfd):
            if pidfd >= 0:
                bwrap.kill(pidfd)
                os.close(pidfd)

    async def _memory_free(self) -> None:
        until = time.monotonic() + FREE_S
        while (self.group.held_bytes() or 0) > LEFT_BYTES:
            if time.monotonic() > until:
                raise sandbox_lost("The memory of the program before is not given back.")
            await asyncio.sleep(FREE_LOOK_S)
        self._was_large = False

    def _kill(self) -> None:
        bwrap.kill(self._child.pidfd)

    def _returncode(self) -> int | None:
        """How the program ended; None if its process 1 was killed before it could tell."""
        with contextlib.suppress(BlockingIOError):
            kind, data, _ = self._packet()
            self._told(kind, data)
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def _told(self, kind: bytes, data: bytes) -> None:
        if kind == FAILED:
            raise sandbox_lost(f"A child of the fork server could not be isolated: {data.decode(errors='replace')}.")
        if kind == ENDED:
            self._status, full = struct.unpack("=II", data)
            self._disk_full = bool(full)
        else:  # also where the slot itself ended, and with it everything that was below it
            self._is_gone = True

    async def _expect(self, expected: bytes) -> _Child:
        try:
            kind, _, pid = await self._next(MEET_S)
        except TimeoutError:
            kind, pid = b"", 0
        if kind != expected or not pid:
            raise sandbox_lost("A slot of the fork server was lost.")
        with _lost():
            return _Child(pid, os.pidfd_open(pid))

    async def _next(self, timeout_s: float) -> tuple[bytes, bytes, int]:
        """The next packet: its kind, what is in it, its sender. Raises TimeoutError."""
        with contextlib.suppress(BlockingIOError):
            return self._packet()
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), readable.set)
        try:
            async with timeout(timeout_s):
                await readable.wait()
        finally:
            loop.remove_reader(self._socket.fileno())
        return self._packet()

    def _packet(self) -> tuple[bytes, bytes, int]:
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(MOST_BYTES, socket.CMSG_SPACE(12))
        except ConnectionError:
            packet, ancillary = b"", []
        pids = [struct.unpack("3i", data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
        return packet[:1], packet[1:], pids[0] if pids else 0


class _Child(NamedTuple):
    pid: int
    pidfd: int


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise sandbox_lost(f"A child of the fork server was lost: {error}.") from error

"""The supervisor's side of the init process of a persistent sandbox, which starts its commands and sessions.

``guest/bubblewrap_init.py`` is the other end, and describes the messages.

* Programs inside cannot see it; it ends the sandbox at the end of its ``ttl_s``, and with the supervisor.
* It has a control group of its own, so that a program cannot have it killed for memory.
* Each program has process ids of its own, and starts only when it is bounded.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.common.timeouts import timeout
from headrace_sandbox.host.cgroups.cgroup import Cgroup, look_at_group, usage_between
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.host.descriptors import Descriptors, is_readable, memory_file, wait_readable
from headrace_sandbox.host.layout import PROGRAM_PATH, SCRATCH
from headrace_sandbox.host.processes import kill_pidfd, wait_for_exit
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.watch import RunningProgram
from headrace_sandbox.result import Isolation, Limits
from headrace_sandbox.runtimes.bubblewrap.admission import choose_processors
from headrace_sandbox.runtimes.bubblewrap.bwrap import Bwrap, end_bwrap, last_message, sandbox_not_made, system_mounts
from headrace_sandbox.runtimes.bubblewrap.credential_sockets import (
    open_pidfd,
    receive_with_sender,
    socket_pair_with_credentials,
)
from headrace_sandbox.runtimes.bubblewrap.guest_files import file_mounts, module_command
from headrace_sandbox.runtimes.bubblewrap.inner_program import END_S, InnerProgram, ProgramBounds
from headrace_sandbox.runtimes.shared.exec_result import INODES, sandbox_lost

INIT_LIMITS = Limits(pids=256, memory_bytes=96 << 20)
"""The limits of the init process and the session hosts together, which run no code of a program."""

OUTER_LIMITS = Limits(open_files=1024, file_bytes=1 << 40)
"""Rlimits of the whole sandbox; each program inside gets lower ones."""

READY_S = 20.0
"""Deadline for the init process to report that it is ready."""


class BubblewrapResources(NamedTuple):
    """The runtime's resources for its sandboxes. ``modules``: compiled guest modules, by path inside."""

    bwrap: Bwrap
    filter: bytes
    groups: CgroupPool
    isolation: Isolation
    modules: Mapping[str, bytes]


class InitProcess:
    """A running init process. ``group`` bounds the programs that it starts."""

    def __init__(
        self, process: subprocess.Popen[bytes], requests: socket.socket, pidfd: int, groups: CgroupPool
    ) -> None:
        self._process = process
        self._requests = requests
        self._pidfd = pidfd
        self._groups = groups
        self._bounds: ProgramBounds | None = None
        self._own_group: Cgroup | None = None

    @classmethod
    async def start(cls, resources: BubblewrapResources, limits: Limits, ttl_s: float) -> InitProcess:
        """Start one. Raises SandboxFailure."""
        ours, theirs = socket_pair_with_credentials()
        with contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            with theirs:
                process = _start_bwrap(resources, limits, ttl_s, theirs)
            undo.pop_all()
        pidfd = None
        try:
            pidfd = await _pidfd_of_sender(ours, b"ready", READY_S)
            if pidfd is None:
                raise sandbox_not_made(last_message(process))
        finally:
            if pidfd is None:
                ours.close()
                await run_to_completion(asyncio.to_thread(end_bwrap, process))
        init = cls(process, ours, pidfd, resources.groups)
        try:
            init._bounds = ProgramBounds(await resources.groups.acquire(limits), choose_processors(limits.cpus))
            init._own_group = await resources.groups.acquire(INIT_LIMITS)
            await asyncio.to_thread(init._own_group.add, _pid_of_pidfd(pidfd))
        except BaseException:
            await run_to_completion(init.end())
            raise
        return init

    @property
    def group(self) -> Cgroup:
        """The control group of its programs."""
        assert self._bounds is not None
        return self._bounds.group

    @property
    def is_alive(self) -> bool:
        return not is_readable(self._pidfd)

    async def start_program(
        self, request: dict[str, Any], stack: contextlib.ExitStack
    ) -> tuple[InnerProgram, RunningProgram]:
        """Start the program of a request, with pipes. It is bounded, and waits for ``go``. Raises SandboxFailure
        ``sandbox-lost``."""
        with Descriptors() as owned:
            (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = owned.pipe(), owned.pipe(), owned.pipe()
            inner = self._send(request, [stdin, stdout, stderr], stack)
            owned.close(stdin, stdout, stderr)  # so that output ends with the program
            pidfd = await inner.wait_first_process()
            inner.go()
            await inner.wait_bounded()
            end = os.dup(inner.end)
            first, before = _pid_of_pidfd(pidfd), self.group.usage()
            owned.release(our_stdin, our_stdout, our_stderr)
        running = RunningProgram(
            stdin=our_stdin,
            stdout=our_stdout,
            stderr=our_stderr,
            end=end,
            returncode=lambda: inner.status,
            kill=lambda: kill_pidfd(pidfd),
            cpu_s=lambda: usage_between(before, self.group.usage()).cpu_s,
            look=lambda: look_at_group(self.group, first, before),
        )
        return inner, running

    async def start_session_host(self, request: dict[str, Any]) -> BubblewrapSessionHost:
        """Start the host of a session. Raises SandboxFailure ``sandbox-lost``."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(ours.close)
            with theirs:
                inner = self._send(request, [theirs.fileno()], stack)
            pidfd = await inner.wait_first_process()
            inner.goes_when_bounded = True
            inner.go()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return BubblewrapSessionHost(reader, writer, pidfd, stack.pop_all())

    def _send(self, request: dict[str, Any], passed_fds: Sequence[int], stack: contextlib.ExitStack) -> InnerProgram:
        """Send a request with these descriptors."""
        assert self._bounds is not None
        with Descriptors() as owned:
            inner, theirs = InnerProgram.make(self._bounds, stack)
            owned.own(theirs)
            entries = [owned.own(os.open(path, os.O_WRONLY)) for path in self.group.entries]
            content = owned.own(memory_file(json.dumps({**request, "group_entries": len(entries)}).encode()))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [content, theirs, *entries, *passed_fds]))
            try:
                self._requests.sendmsg([b"r"], [rights])
            except OSError as error:
                raise sandbox_lost(f"The sandbox accepts no request: {error.strerror}.") from error
        return inner

    async def end(self) -> None:
        """End it, and all that runs in its sandbox. Raises SandboxFailure ``unkillable``."""
        kill_pidfd(self._pidfd)
        self._process.kill()
        try:
            await wait_for_exit(self._pidfd, END_S)
            await asyncio.to_thread(end_bwrap, self._process)
            for group in (self._bounds and self._bounds.group, self._own_group):
                if group is not None:
                    await self._groups.release(group)
        finally:
            self._requests.close()
            os.close(self._pidfd)


class BubblewrapSessionHost:
    """The host of a session, in process ids of its own."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pidfd: int, stack: contextlib.ExitStack
    ) -> None:
        self.reader, self.writer = reader, writer
        self._pidfd = pidfd
        self._stack = stack

    async def end(self) -> None:
        """Kill it, and all that it started."""
        with self._stack:
            kill_pidfd(self._pidfd)
            self.writer.close()
            await wait_for_exit(self._pidfd, END_S)
            with contextlib.suppress(ConnectionError):
                await self.writer.wait_closed()


def _start_bwrap(
    resources: BubblewrapResources, limits: Limits, ttl_s: float, requests: socket.socket
) -> subprocess.Popen[bytes]:
    outer = Limits(
        pids=limits.pids + INIT_LIMITS.pids,
        open_files=OUTER_LIMITS.open_files,
        file_bytes=OUTER_LIMITS.file_bytes,
    )
    with Descriptors() as owned:
        filter_ = owned.own(memory_file(resources.filter))
        modules = {path: owned.own(memory_file(code)) for path, code in resources.modules.items()}
        arguments = [
            *(*system_mounts(), "--dir", SCRATCH, "--dir", "/session", *file_mounts(modules)),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--as-pid-1"),
            *("--setenv", "PATH", PROGRAM_PATH, "--"),
            *module_command("bubblewrap_init", f"{filter_}", f"{ttl_s}", f"{limits.disk_bytes}", f"{INODES}"),
        ]
        return resources.bwrap.start(arguments, outer, [filter_, *modules.values()], requests.fileno())


async def _pidfd_of_sender(from_: socket.socket, word: bytes, within_s: float) -> int | None:
    """A descriptor of the process that sends this word next; None if none does."""
    try:
        async with timeout(within_s):
            await wait_readable(from_.fileno())
        data, sender = receive_with_sender(from_, 16)
    except (TimeoutError, OSError):
        return None
    return open_pidfd(sender) if data == word else None


def _pid_of_pidfd(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

"""A sandbox of gVisor that lives on: what it runs, its sessions and its files.

* It is a kernel of its own, in a control group that bounds it together with what runs on it. Processes are bounded
  inside: a kernel that the machine refuses a thread ends.
* Each command and each session has process ids of its own: its end is the end of all that it started, and of nothing
  else. Files, network, shared memory and limits are the sandbox's.
* Where memory is over, this machine kills a process of the program's, and the kernel goes on, or the kernel itself.
  Then the program has lost its sandbox: the result says so, and so does every later one.
* A kernel that was killed from outside is a fault of ours.
* A reset makes all of it anew; nothing is taken over.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.bwrap import environment, too_large
from headrace_sandbox.host.cgroups import Cgroup, Groups, since
from headrace_sandbox.host.watch import supervise, to_the_end
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.base import Command, Session, SessionKind, Template
from headrace_sandbox.runtimes.gvisor.connection import END_S, Guest, Program, first_command
from headrace_sandbox.runtimes.gvisor.runsc import Container, Runsc
from headrace_sandbox.runtimes.shared.files import Files, WithFiles
from headrace_sandbox.runtimes.shared.outcome import limit_hit, result_of, sandbox_lost, weak_limits
from headrace_sandbox.runtimes.shared.sessions import HostedSession, Parts

START_BYTES = 1 << 30
"""Memory while a sandbox starts. What its kernel takes until then is added to the limit, and taken off the peak."""

KERNEL_THREADS, THREADS_OF_ONE = 512, 4
"""Threads of the machine that a kernel may have, and as many more for each process inside."""

START_CPUS = 8.0
"""Processors while a sandbox starts: nothing of a program's runs then, and it is not slowed down."""

MOST_STRING_BYTES, MOST_STRINGS_BYTES = 128 << 10, 2_000_000
"""Of one argument or variable, and of all together: Linux takes no more, nor does gVisor."""

KILLED = (137, -9)
"""How runsc ends when its kernel, or it itself, was killed by SIGKILL: nothing inside can send that."""

EXPIRED = 142
"""How it ends when the time of the sandbox is over."""


class Surroundings(NamedTuple):
    """What the runtime has for its sandboxes."""

    runsc: Runsc
    filter: bytes
    groups: Groups
    isolation: Isolation


class GvisorSandbox(WithFiles):
    """The sandbox. ``id`` is not known inside."""

    def __init__(self, around: Surroundings, template: Template, ttl_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = around.isolation
        self._around = around
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._kernel: _Kernel | None = None
        self._sessions: set[HostedSession] = set()
        self._files = Files(self._do_with_files, template.limits.disk_bytes)
        self._is_closed = False
        self.lost: str | None = None
        """Why it cannot be used any more, where its programs brought that about."""

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        self._kernel = await _Kernel.start(self._around, self._template, self._deadline - time.monotonic())
        try:
            await self._files.put(self._template.files)
        except BaseException:
            await self._end_kernel()
            raise

    async def run(self, command: Command, limits: Limits, begun_at: float | None = None) -> ExecResult:
        """Run a command; what it leaves is killed. ``begun_at``: of the call, if that was earlier. Raises
        SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic() if begun_at is None else begun_at
        if (cause := await self.why_lost()) is not None:
            return lost_result(cause, self.isolation)
        variables = environment({**self._template.environment, **command.environment})
        _check_size([*command.arguments, *(f"{name}={value}" for name, value in variables.items())])
        await self._files.put(command.files)
        request = {"do": "command", "arguments": list(command.arguments), "environment": variables}
        return await self._execute(request, command.stdin, limits, begun_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure."""
        request = {"do": "session", "kind": kind, "environment": environment(self._template.environment)}

        async def start() -> _SessionHost:
            return await _SessionHost.start(self._alive().guest, request)

        usage = self._alive().usage
        hosted = HostedSession(Parts(start, usage, self._why_gone, self.isolation))
        await hosted.start()
        self._sessions.add(hosted)
        return GvisorSession(self, hosted)

    async def reset(self) -> None:
        """Make it anew, for the time that it has left; its sessions are closed. Raises SandboxFailure."""
        self._alive()
        await self._end_kernel()
        await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self._is_closed = True
        await self._end_kernel()

    async def _end_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await to_the_end(kernel.end())
        while self._sessions:
            await self._sessions.pop().close()

    async def _do_with_files(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        result = await self._execute({"do": "files", **request}, content, limits, time.monotonic())
        if result.lost is not None:
            raise _lost(result.lost)
        return result

    async def _execute(self, request: dict[str, Any], stdin: bytes, limits: Limits, begun_at: float) -> ExecResult:
        kernel = self._alive()
        before = kernel.usage()
        try:
            program = await kernel.guest.start(request)
        except SandboxFailure:
            if (cause := await self.why_lost()) is None:
                raise
            return lost_result(cause, self.isolation)
        start_s = time.monotonic() - begun_at
        started = kernel.guest.started(program, lambda: since(before, kernel.usage()).cpu_s)
        verdict = await supervise(started, stdin, limits)
        usage = since(before, kernel.usage())
        if program.ended is not None and program.ended.disk_full:
            usage = msgspec.structs.replace(usage, disk_full=True)
        if program.ended is not None and program.ended.left + 1 >= self._template.limits.pids:
            usage = msgspec.structs.replace(usage, refused_pids=max(1, usage.refused_pids))
        if not kernel.guest.is_gone or verdict.returncode is not None:
            return result_of(verdict, usage, start_s, self.isolation)
        return ExecResult(
            exit_code=None,
            signal=None,
            stdout=verdict.stdout,
            stderr=verdict.stderr,
            limit=verdict.limit or limit_hit(usage),
            wall_s=verdict.wall_s,
            start_s=start_s,
            lost=await self._why_gone(),
            usage=usage,
            isolation=self.isolation,
        )

    def _alive(self) -> _Kernel:
        """Raises SandboxFailure if it cannot be used."""
        if self._is_closed or self._kernel is None:
            raise SandboxFailure("The sandbox was closed.", kind="closed", retryable=False)
        if time.monotonic() >= self._deadline:
            raise _expired()
        if self.lost is not None:
            raise _lost(self.lost)
        return self._kernel

    async def why_lost(self) -> str | None:
        """What its programs did to it, if it is gone. Raises SandboxFailure where that was somebody else."""
        if self.lost is None and self._kernel is not None and self._kernel.guest.is_gone:
            await self._why_gone()
        return self.lost

    async def _why_gone(self) -> str:
        kernel = self._kernel
        if kernel is None or time.monotonic() >= self._deadline:
            self._alive()
        assert kernel is not None
        if self.lost is None:
            self.lost = await kernel.why_gone()
        return self.lost


class GvisorSession:
    """A session, which is lost with its sandbox."""

    def __init__(self, sandbox: GvisorSandbox, hosted: HostedSession) -> None:
        self._sandbox = sandbox
        self._hosted = hosted

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        """Run a cell. Raises SandboxFailure."""
        if (cause := await self._sandbox.why_lost()) is not None:
            return lost_result(cause, self._sandbox.isolation)
        return await self._hosted.run(cell, limits)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does."""
        await self._hosted.interrupt()

    async def close(self) -> None:
        """End it, and everything that it started."""
        await self._hosted.close()


class _Kernel:
    """A kernel that runs, in its control group."""

    def __init__(self, container: Container, group: Cgroup, groups: Groups) -> None:
        self.guest = Guest(container)
        self._container = container
        self._group = group
        self._groups = groups
        self._own_bytes = 0

    @classmethod
    async def start(cls, around: Surroundings, template: Template, ttl_s: float) -> _Kernel:
        """Start one. Raises SandboxFailure."""
        limits = template.limits
        threads = KERNEL_THREADS + THREADS_OF_ONE * limits.pids
        at_start = msgspec.structs.replace(limits, cpus=START_CPUS, memory_bytes=START_BYTES, pids=threads)
        group = around.groups.take(at_start)
        try:
            options = {
                "disk_bytes": limits.disk_bytes,
                "ttl_s": ttl_s,
                "filter": around.filter.hex(),
                "cpus": limits.cpus,
                "rlimits": _rlimits(limits, is_weak=not around.groups.driver.active),
            }
            container = around.runsc.start(template.image, first_command(options), group)
        except BaseException:
            around.groups.give_back(group)
            raise
        kernel = cls(container, group, around.groups)
        try:
            await kernel.guest.ready()
            kernel._bound(msgspec.structs.replace(limits, pids=threads), at_start)
        except BaseException:
            await to_the_end(kernel.end())
            raise
        return kernel

    def _bound(self, limits: Limits, at_start: Limits) -> None:
        """Programs may have what the limits say, beyond what the kernel has by now."""
        self._group.open(at_start)  # counts anew, so the peak is what there is
        self._own_bytes = self._group.usage().peak_memory_bytes or 0
        self._group.open(msgspec.structs.replace(limits, memory_bytes=limits.memory_bytes + self._own_bytes))

    def usage(self) -> Usage:
        """What was used so far, without what the kernel had when it started."""
        usage = self._group.usage()
        if usage.peak_memory_bytes is None:
            return usage
        return msgspec.structs.replace(usage, peak_memory_bytes=max(0, usage.peak_memory_bytes - self._own_bytes))

    async def why_gone(self) -> str:
        """What its programs did. Raises SandboxFailure ``sandbox-lost`` where it was ended from outside."""
        usage = self.usage()
        if usage.memory_kills:
            return "its processes ran into the limit of memory, and that ended its kernel"
        if usage.refused_pids:
            return "its processes ran into the limit of processes, and that ended its kernel"
        if self.guest.killed_for is not None:
            return self.guest.killed_for
        code = await asyncio.to_thread(self._container.returncode)
        if code in KILLED:
            raise sandbox_lost("The kernel of the sandbox was killed from outside.")
        if code == EXPIRED:
            raise _expired()
        return f"its kernel ended with {code}"

    async def end(self) -> None:
        """End it, and all that runs on it. Raises SandboxFailure ``unkillable``."""
        self.guest.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._container.close()
        finally:
            self._groups.give_back(self._group)


class _SessionHost:
    """The host of a session: a program that talks over its input and output."""

    def __init__(
        self, guest: Guest, program: Program, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer
        self._guest = guest
        self._program = program

    @classmethod
    async def start(cls, guest: Guest, request: Mapping[str, Any]) -> _SessionHost:
        """Start one. Raises SandboxFailure."""
        program = await guest.start(request)
        for descriptor in (program.stderr, program.end):
            os.close(descriptor)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(program.stdout, "rb", 0))
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(program.stdin, "wb", 0)
        )
        return cls(guest, program, reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def end(self) -> None:
        """Kill it, and all that it started."""
        self._guest.kill(self._program)
        self.writer.close()
        async with timeout(END_S):
            await self._program.gone.wait()


def _rlimits(limits: Limits, *, is_weak: bool) -> dict[str, int]:
    rlimits = {"nofile": limits.open_files, "fsize": limits.file_bytes, "core": 0, "nproc": limits.pids}
    if is_weak:
        rlimits["as"] = weak_limits(limits)["as"]
    return {f"RLIMIT_{name.upper()}": value for name, value in rlimits.items()}


def lost_result(cause: str, isolation: Isolation) -> ExecResult:
    """The result of what was asked of a sandbox that is lost."""
    return ExecResult(
        exit_code=None,
        signal=None,
        stdout=Output(),
        stderr=Output(),
        limit=None,
        wall_s=0.0,
        start_s=0.0,
        lost=cause,
        usage=Usage(),
        isolation=isolation,
    )


def _check_size(strings: Sequence[str]) -> None:
    sizes = [len(string.encode(errors="surrogateescape")) for string in strings]
    if max(sizes) >= MOST_STRING_BYTES or sum(sizes) >= MOST_STRINGS_BYTES:
        raise too_large()


def _lost(cause: str) -> SandboxFailure:
    return SandboxFailure(f"The sandbox is lost: {cause}.", kind="sandbox-lost", retryable=False)


def _expired() -> SandboxFailure:
    return SandboxFailure(
        "The sandbox's time is over.",
        hint="Open it with a larger ttl_s, or open another.",
        kind="expired",
        retryable=True,
    )

"""A persistent sandbox of gVisor: its commands, its sessions and its files.

* Processes are bounded inside, by the kernel of the sandbox: a kernel that this machine refuses a thread ends.
* Each command and each session has process ids of its own: its end is the end of all that it started, and of nothing
  else. Files, network, shared memory and limits are the sandbox's.
* Where memory runs out, this machine kills a process of a program, and the kernel goes on, or the kernel itself. Then
  the program has lost its sandbox: its result says so, and so does every later one.
* A kernel that was killed from outside is a fault of ours.
* A reset recreates the whole sandbox; nothing is kept.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import usage_between
from headrace_sandbox.host.layout import program_environment
from headrace_sandbox.host.processes import command_too_large
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.watch import watch_program
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import SandboxCommand, Session, SessionKind, Template
from headrace_sandbox.runtimes.gvisor.connection import END_S, GuestConnection, GuestProgram
from headrace_sandbox.runtimes.gvisor.kernel import GvisorKernel, GvisorResources
from headrace_sandbox.runtimes.shared.exec_result import (
    exec_result,
    limit_hit,
    lost_result,
    sandbox_closed,
    sandbox_expired,
)
from headrace_sandbox.runtimes.shared.files import FileCalls, SandboxFiles
from headrace_sandbox.runtimes.shared.sessions import HostedSession, SessionBackend

MOST_STRING_BYTES, MOST_STRINGS_BYTES = 128 << 10, 2_000_000
"""The limits of Linux and gVisor for one argument or variable, and for all together."""


class GvisorSandbox(FileCalls):
    """The sandbox. ``id`` is not known inside."""

    def __init__(self, resources: GvisorResources, template: Template, ttl_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = resources.isolation
        self._resources = resources
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._kernel: GvisorKernel | None = None
        self._sessions: set[HostedSession] = set()
        self._files = SandboxFiles(self._run_file_request, template.limits.disk_bytes)
        self._is_closed = False
        self.lost: str | None = None
        """The reason that it cannot be used any more, if its programs brought that about."""

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        left_s = self._deadline - time.monotonic()
        self._kernel = await GvisorKernel.start(self._resources, self._template, left_s)
        try:
            await self._files.put(self._template.files)
        except BaseException:
            await self._end_kernel()
            raise

    async def run(self, command: SandboxCommand, limits: Limits, started_at: float | None = None) -> ExecResult:
        """Run a command; its background processes are killed. ``started_at``: the start of the call, if that was
        earlier. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic() if started_at is None else started_at
        if (reason := await self.why_lost()) is not None:
            return lost_result(reason, self.isolation)
        variables = program_environment({**self._template.environment, **command.environment})
        _check_size([*command.arguments, *(f"{name}={value}" for name, value in variables.items())])
        await self._files.put(command.files)
        request = {"do": "command", "arguments": list(command.arguments), "environment": variables}
        return await self._execute(request, command.stdin, limits, started_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure."""
        request = {"do": "session", "kind": kind, "environment": program_environment(self._template.environment)}

        async def start_host() -> GvisorSessionHost:
            return await GvisorSessionHost.start(self._require_kernel().guest, request)

        kernel = self._require_kernel()
        cpus = self._template.limits.cpus
        backend = SessionBackend(start_host, kernel.usage, self._why_gone, self.isolation, kernel.threads, cpus)
        hosted = HostedSession(backend)
        await hosted.start()
        self._sessions.add(hosted)
        return GvisorSession(self, hosted)

    async def reset(self) -> None:
        """Recreate it for the rest of its time; its sessions are closed. Raises SandboxFailure."""
        self._require_kernel()
        await self._end_kernel()
        await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self._is_closed = True
        await self._end_kernel()

    async def _end_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await run_to_completion(kernel.end())
        while self._sessions:
            await self._sessions.pop().close()

    async def _run_file_request(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        result = await self._execute({"do": "files", **request}, content, limits, time.monotonic())
        if result.lost is not None:
            raise _lost_earlier(result.lost)
        return result

    async def _execute(self, request: dict[str, Any], stdin: bytes, limits: Limits, started_at: float) -> ExecResult:
        kernel = self._require_kernel()
        before = kernel.usage()
        try:
            program = await kernel.guest.start(request)
        except SandboxFailure:
            if (reason := await self.why_lost()) is None:
                raise
            return lost_result(reason, self.isolation)
        start_s = time.monotonic() - started_at
        running = kernel.guest.running_program(
            program, lambda: usage_between(before, kernel.usage()).cpu_s, kernel.threads
        )
        limits = msgspec.structs.replace(limits, cpus=self._template.limits.cpus)
        outcome = await watch_program(running, stdin, limits)
        usage = usage_between(before, kernel.usage())
        if program.exit is not None and program.exit.disk_full:
            usage = msgspec.structs.replace(usage, disk_full=True)
        if program.exit is not None and program.exit.others + 1 >= self._template.limits.pids:
            usage = msgspec.structs.replace(usage, refused_pids=max(1, usage.refused_pids))
        if not kernel.guest.is_gone or outcome.returncode is not None:
            return exec_result(outcome, usage, start_s, self.isolation)
        return ExecResult(
            exit_code=None,
            signal=None,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            limit=outcome.limit or limit_hit(usage),
            wall_s=outcome.wall_s,
            work_s=outcome.work_s,
            start_s=start_s,
            lost=await self._why_gone(),
            usage=usage,
            isolation=self.isolation,
        )

    def _require_kernel(self) -> GvisorKernel:
        """The kernel. Raises SandboxFailure if the sandbox cannot be used."""
        if self._is_closed or self._kernel is None:
            raise sandbox_closed()
        if time.monotonic() >= self._deadline:
            raise sandbox_expired()
        if self.lost is not None:
            raise _lost_earlier(self.lost)
        return self._kernel

    async def why_lost(self) -> str | None:
        """The reason of its end, if its programs brought that about, or None while it lives. Raises SandboxFailure if
        it was ended from outside."""
        if self.lost is None and self._kernel is not None and self._kernel.guest.is_gone:
            await self._why_gone()
        return self.lost

    async def _why_gone(self) -> str:
        kernel = self._kernel
        if kernel is None or time.monotonic() >= self._deadline:
            self._require_kernel()
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
        if (reason := await self._sandbox.why_lost()) is not None:
            return lost_result(reason, self._sandbox.isolation)
        return await self._hosted.run(cell, limits)

    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does."""
        await self._hosted.interrupt()

    async def close(self) -> None:
        """End it, and everything that it started."""
        await self._hosted.close()


class GvisorSessionHost:
    """The host of a session: a program whose input and output carry the frames."""

    def __init__(
        self,
        guest: GuestConnection,
        program: GuestProgram,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.reader, self.writer = reader, writer
        self._guest = guest
        self._program = program

    @classmethod
    async def start(cls, guest: GuestConnection, request: Mapping[str, Any]) -> GvisorSessionHost:
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
            await self._program.ended.wait()


def _check_size(strings: Sequence[str]) -> None:
    sizes = [len(string.encode(errors="surrogateescape")) for string in strings]
    if max(sizes) >= MOST_STRING_BYTES or sum(sizes) >= MOST_STRINGS_BYTES:
        raise command_too_large()


def _lost_earlier(reason: str) -> SandboxFailure:
    return SandboxFailure(f"The sandbox is lost: {reason}.", kind="sandbox-lost", retryable=False)

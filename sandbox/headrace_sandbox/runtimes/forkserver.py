"""Python programs in forks of a warm interpreter, each isolated for itself.

* An execution has namespaces, a scratch folder, limits, a control group and a filter of its own.
* The server is inside a sandbox too, holds no secret, and is made anew when it is lost.
* One server serves one set of preloaded modules and one trust domain: make another object for another.
* How a program ended is told by its process 1, over a socket that the program does not have.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Sequence

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox import bwrap
from headrace_sandbox.bwrap import SCRATCH, Bwrap
from headrace_sandbox.cgroups import Cgroup, Driver, Groups, find_driver
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes import inside
from headrace_sandbox.runtimes.base import PRELOAD, PythonProgram, checked_path
from headrace_sandbox.runtimes.inside import PYTHON
from headrace_sandbox.runtimes.verdicts import admit, isolation_of, result_of, sandbox_lost, weak_limits
from headrace_sandbox.seccomp import require_filter
from headrace_sandbox.supervise import Started, supervise

INODES = 10_000
"""Most files of a scratch folder: empty ones take no bytes of it, but memory of the kernel."""

SERVER_LIMITS = Limits(pids=1 << 15, memory_bytes=1 << 30, open_files=1024, file_bytes=1 << 30)
"""Of the server and all its children together; each execution has its own, far below."""

READY_S = 20.0
"""For a server to import what it preloads."""

MEET_S = 10.0
"""For a forked child to be there."""

MOST_BYTES = 64 << 20
"""Of a program and its files."""


class ForkServer:
    """Runs Python programs. ``preload``: modules that are imported once, before anything is forked."""

    def __init__(self, driver: Driver | None = None, preload: Sequence[str] = PRELOAD, python: str = PYTHON) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-filter``."""
        self._bwrap = Bwrap()
        self._filter = require_filter()
        self._groups = Groups(driver if driver is not None else find_driver())
        self._preload = tuple(preload)
        self._python = python
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self.isolation = isolation_of("bubblewrap", self._bwrap, self._groups.driver)

    async def run(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a program to its end. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        request = _request(program, limits, is_weak=not self._groups.driver.active)
        with contextlib.ExitStack() as stack:
            group = self._groups.take(limits)
            stack.callback(self._groups.give_back, group)
            started = await self._start(request, limits, group, stack)
            start_s = time.monotonic() - begun_at
            verdict = await supervise(started, program.stdin, limits)
            usage = group.usage()
        return result_of(verdict, usage, start_s, self.isolation)

    async def close(self) -> None:
        """End the server, and remove what is kept between executions."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._groups.close()

    async def _start(self, request: bytes, limits: Limits, group: Cgroup, stack: contextlib.ExitStack) -> Started:
        server = await self._running()
        child = _Child(request, stack)
        try:
            server.ask(child.handed)
        finally:
            child.hand_over()
        pid = await child.meet()
        pidfd = None if pid is None else admit(pid, group, limits, stack)
        if pidfd is None:
            child.close()
            raise sandbox_lost("The fork server was lost while an execution began.")
        child.go()
        return Started(
            stdin=child.stdin,
            stdout=child.stdout,
            stderr=child.stderr,
            end=os.dup(child.supervisor.fileno()),
            returncode=child.returncode,
            kill=lambda: bwrap.kill(pidfd),
            cpu_s=lambda: group.usage().cpu_s,
        )

    async def _running(self) -> _Server:
        async with self._starting:
            if self._server is None or not self._server.lives:
                if self._server is not None:
                    self._server.close()
                self._server = None
                self._server = await self._make()
        return self._server

    async def _make(self) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        filter_, sources = bwrap.memory_file(self._filter), inside.sources("isolation", "forkserver")
        arguments = [
            *(*bwrap.system(), "--dir", SCRATCH, *inside.mounts(sources)),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", bwrap.PROGRAM_PATH, "--"),
            *inside.command("forkserver", f"{filter_}", *self._preload, python=self._python),
        ]
        with theirs:
            process = self._bwrap.start(arguments, SERVER_LIMITS, [filter_, *sources.values()], theirs.fileno())
        server = _Server(process, ours)
        if not await server.is_ready():
            said = server.close()
            raise bwrap.not_made(said)
        return server


class _Server:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[bytes], requests: socket.socket) -> None:
        self._process = process
        self._requests = requests
        requests.setblocking(False)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    async def is_ready(self) -> bool:
        try:
            async with asyncio.timeout(READY_S):
                return bool(await asyncio.get_running_loop().sock_recv(self._requests, 16))
        except (TimeoutError, OSError):
            return False

    def ask(self, handed: Sequence[int]) -> None:
        """Ask for a child. Raises SandboxFailure ``sandbox-lost``."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handed))
        try:
            self._requests.sendmsg([b"1"], [rights])
        except OSError as error:
            raise sandbox_lost(f"The fork server takes no request: {error}.") from error

    def close(self) -> str:
        """End it, and all that runs in it; gives what it said last."""
        self._requests.close()
        self._process.kill()
        said = b""
        if self._process.stderr is not None and not self._process.stderr.closed:
            os.set_blocking(self._process.stderr.fileno(), False)
            said = self._process.stderr.read() or b""
        bwrap.reap(self._process)
        return said.decode(errors="replace").strip()


class _Child:
    """The descriptors of one execution: ours, and those that its child gets."""

    def __init__(self, request: bytes, stack: contextlib.ExitStack) -> None:
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.supervisor, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.supervisor.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.supervisor.setblocking(False)
        stack.callback(self.supervisor.close)
        self.handed = [stdin, stdout, stderr, theirs.detach(), bwrap.memory_file(request)]

    def hand_over(self) -> None:
        """They are the child's now."""
        for descriptor in self.handed:
            os.close(descriptor)

    async def meet(self) -> int | None:
        """The child's process, as this machine numbers it; None if it ended before it was there."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.supervisor.fileno(), readable.set)
        try:
            async with asyncio.timeout(MEET_S):
                await readable.wait()
            _, ancillary, _, _ = self.supervisor.recvmsg(1, socket.CMSG_SPACE(12))
        except (TimeoutError, OSError):
            ancillary = []
        finally:
            loop.remove_reader(self.supervisor.fileno())
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid: int = struct.unpack("3i", data)[0]
                return pid or None
        return None

    def close(self) -> None:
        """Close what nobody has taken over."""
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)

    def go(self) -> None:
        """Let the program start."""
        with contextlib.suppress(BrokenPipeError):
            self.supervisor.send(b"1")

    def returncode(self) -> int | None:
        """How the program ended; None if its process 1 was killed before it could tell."""
        try:
            status = self.supervisor.recv(4)
        except OSError:
            status = b""
        return os.waitstatus_to_exitcode(struct.unpack("=I", status)[0]) if len(status) == 4 else None


def _request(program: PythonProgram, limits: Limits, *, is_weak: bool) -> bytes:
    weak = {f"RLIMIT_{name.upper()}": value for name, value in weak_limits(limits).items()} if is_weak else {}
    request = msgspec.json.encode(
        {
            "code": program.code,
            "arguments": program.arguments,
            "files": {checked_path(path): data.decode("latin-1") for path, data in program.files.items()},
            "environment": bwrap.environment(program.environment),
            "disk_bytes": limits.disk_bytes,
            "inodes": INODES,
            "rlimits": {
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_FSIZE": limits.file_bytes,
                "RLIMIT_CORE": 0,
                **weak,
            },
        }
    )
    if len(request) > MOST_BYTES:
        raise SandboxFailure(
            f"Program and files have {len(request)} bytes, and at most {MOST_BYTES} are taken.",
            hint="Hand less in, or use a sandbox that lives on and takes files one by one.",
            kind="request-too-large",
            retryable=False,
        )
    return request

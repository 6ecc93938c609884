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
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.bwrap import SCRATCH, Bwrap
from headrace_sandbox.host.cgroups import Driver, Groups, find_driver
from headrace_sandbox.host.descriptors import Descriptors, refused_by_machine
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.watch import supervise, to_the_end
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PRELOAD, PythonProgram, check_room
from headrace_sandbox.runtimes.bubblewrap.fork_slot import Slot
from headrace_sandbox.runtimes.shared import guest_programs
from headrace_sandbox.runtimes.shared.guest_programs import PYTHON
from headrace_sandbox.runtimes.shared.outcome import isolation_of, processors, result_of, sandbox_lost, weak_limits

INODES = 10_000
"""Most files of a scratch folder: empty ones take no bytes of it, but memory of the kernel."""

SERVER_LIMITS = Limits(pids=1 << 15, memory_bytes=1 << 30, open_files=1024, file_bytes=1 << 40)
"""Of the server and all its children together; each execution has its own, far below."""

READY_S = 20.0
"""For a server to import what it preloads."""

MOST_FREE = 16
"""Slots that are kept while they are not used."""

IDLE_S = 10.0
"""After which a slot that nobody uses is ended, and its memory free; making one takes some 20 ms."""

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
        self._free: deque[Slot] = deque()
        self._look: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.isolation = isolation_of("bubblewrap", self._bwrap, self._groups.driver)

    async def run(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a program to its end. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        request = _request(program, limits, is_weak=not self._groups.driver.active)
        with refused_by_machine():
            return await self._run(request, program.stdin, limits, begun_at)

    async def _run(self, request: bytes, stdin: bytes, limits: Limits, begun_at: float) -> ExecResult:
        async with self._slot(limits) as slot:
            started = slot.start(request)
            start_s = time.monotonic() - begun_at
            verdict = await supervise(started, stdin, limits)
            usage = await slot.gone()
        return result_of(verdict, usage, start_s, self.isolation)

    async def close(self) -> None:
        """End the server, and remove what is kept between executions."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        while self._free:
            await self._give_up(self._free.pop())
        await asyncio.gather(*self._closing)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        await asyncio.to_thread(self._groups.close)

    @contextlib.asynccontextmanager
    async def _slot(self, limits: Limits) -> AsyncIterator[Slot]:
        """A slot in which a child waits. It is used again if all went well in it, and ended if not."""
        slot = await self._ready(limits)
        try:
            yield slot
        except BaseException:
            await self._give_up(slot)
            raise
        slot.used_at = time.monotonic()
        self._free.append(slot)
        if len(self._free) > MOST_FREE:
            await self._give_up(self._free.popleft())
        elif self._look is None:
            self._look = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        """End the slots that nobody used for a while; of those that are free the first waits longest."""
        loop, long_ago = asyncio.get_running_loop(), time.monotonic() - IDLE_S
        while self._free and self._free[0].used_at <= long_ago:
            closing = loop.create_task(self._give_up(self._free.popleft()))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._look = loop.call_later(IDLE_S, self._end_idle) if self._free else None

    async def _ready(self, limits: Limits) -> Slot:
        server = await self._running()
        while True:
            is_new = not self._free
            slot = await self._make_slot(server) if is_new else self._free.popleft()
            try:
                await slot.ready(limits)
            except BaseException as error:
                await self._give_up(slot)
                if is_new or not isinstance(error, SandboxFailure):
                    raise
            else:
                return slot

    async def _make_slot(self, server: _Server) -> Slot:
        slot = Slot(await self._groups.taken(Limits()))
        try:
            await slot.make(server.ask)
        except BaseException:
            await self._give_up(slot)
            raise
        return slot

    async def _give_up(self, slot: Slot) -> None:
        slot.close()
        with contextlib.suppress(SandboxFailure):  # then its group is not used again
            await self._groups.given_back(slot.group)

    async def _running(self) -> _Server:
        async with self._starting:
            if self._server is None or not self._server.lives:
                if self._server is not None:
                    await asyncio.to_thread(self._server.close)
                self._server = None
                self._server = await self._make()
        return self._server

    async def _make(self) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, Descriptors() as made, theirs:
            undo.enter_context(ours)
            filter_ = made.own(bwrap.memory_file(self._filter))
            sources = guest_programs.sources(made, "isolation", "fork_server")
            arguments = [
                *(*bwrap.system(), "--dir", SCRATCH, *guest_programs.mounts(sources)),
                *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", bwrap.PROGRAM_PATH, "--"),
                *guest_programs.command("fork_server", f"{filter_}", *self._preload, python=self._python),
            ]
            process = self._bwrap.start(arguments, SERVER_LIMITS, [filter_, *sources.values()], theirs.fileno())
            undo.pop_all()
        server, is_ready, said = _Server(process, ours), False, ""
        try:
            is_ready = await server.is_ready()
        finally:
            if not is_ready:
                said = await to_the_end(asyncio.to_thread(server.close))
        if not is_ready:
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
            async with timeout(READY_S):
                return bool(await asyncio.get_running_loop().sock_recv(self._requests, 16))
        except (TimeoutError, OSError):
            return False

    def ask(self, handed: Sequence[int]) -> None:
        """Ask for a slot. Raises SandboxFailure ``sandbox-lost``."""
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


def _request(program: PythonProgram, limits: Limits, *, is_weak: bool) -> bytes:
    check_room(program.files, limits)
    weak = {f"RLIMIT_{name.upper()}": value for name, value in weak_limits(limits).items()} if is_weak else {}
    request = msgspec.json.encode(
        {
            "code": program.code,
            "arguments": program.arguments,
            "files": {path: data.decode("latin-1") for path, data in program.files.items()},
            "environment": bwrap.environment(program.environment),
            "disk_bytes": limits.disk_bytes,
            "inodes": INODES,
            "processors": sorted(processors(limits.cpus) or ()),
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

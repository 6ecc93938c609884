"""Runs Python programs in forks of a warm interpreter, each isolated by itself.

* An execution has namespaces, a scratch folder, limits, a control group and a system-call filter of its own.
* The server runs inside a sandbox too, holds no secret, and is recreated when it is lost.
* One server serves one set of preloaded modules and one trust domain; another one needs another object.
* A program's end is reported by its process 1, over a socket that the program does not have.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import CgroupDriver
from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.host.descriptors import Descriptors, memory_file, os_errors_as_failures
from headrace_sandbox.host.layout import PROGRAM_PATH, SCRATCH, program_environment
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.watch import watch_program
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PRELOAD, PythonProgram, check_room
from headrace_sandbox.runtimes.bubblewrap.admission import choose_processors
from headrace_sandbox.runtimes.bubblewrap.bwrap import Bwrap, end_bwrap, last_message, sandbox_not_made, system_mounts
from headrace_sandbox.runtimes.bubblewrap.fork_slot import Slot
from headrace_sandbox.runtimes.bubblewrap.guest_files import file_mounts, module_command, source_files
from headrace_sandbox.runtimes.shared.exec_result import INODES, exec_result, fallback_rlimits, sandbox_lost
from headrace_sandbox.runtimes.shared.guest_modules import PYTHON

SERVER_LIMITS = Limits(pids=1 << 15, memory_bytes=1 << 30, open_files=1024, file_bytes=1 << 40)
"""The limits of the server and all its children together; each execution has its own, far below."""

READY_S = 20.0
"""Deadline for a server to import its preloaded modules."""

MOST_FREE = 16
"""Most free slots that are kept."""

IDLE_S = 10.0
"""Free slots end after this time without use, which frees their memory; making one takes some 20 ms."""

MOST_BYTES = 64 << 20
"""Largest program with its files."""


class ForkServer:
    """Runs Python programs. ``preload``: modules that are imported once, before anything is forked."""

    def __init__(
        self, driver: CgroupDriver | None = None, preload: Sequence[str] = PRELOAD, python: str = PYTHON
    ) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-filter``."""
        self._bwrap = Bwrap()
        self._filter = require_filter()
        self._groups = CgroupPool(driver if driver is not None else find_driver())
        self._preload = tuple(preload)
        self._python = python
        self._server: _ServerProcess | None = None
        self._start_lock = asyncio.Lock()
        self._free: deque[Slot] = deque()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.isolation = self._bwrap.isolation(self._groups.driver)

    async def run(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a program to its end. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        request = _request(program, limits, has_groups=bool(self._groups.driver.active))
        with os_errors_as_failures():
            async with self._slot(limits) as slot:
                running = slot.start(request)
                start_s = time.monotonic() - started_at
                outcome = await watch_program(running, program.stdin, limits)
                usage = await slot.wait_gone()
            return exec_result(outcome, usage, start_s, self.isolation)

    async def close(self) -> None:
        """End the server, and remove everything that is kept between executions."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        while self._free:
            await self._end_slot(self._free.pop())
        await asyncio.gather(*self._ending)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        await asyncio.to_thread(self._groups.close)

    @contextlib.asynccontextmanager
    async def _slot(self, limits: Limits) -> AsyncIterator[Slot]:
        """A slot with a waiting child. It is used again after a success, and ended after a failure."""
        slot = await self._ready_slot(limits)
        try:
            yield slot
        except BaseException:
            await self._end_slot(slot)
            raise
        slot.used_at = time.monotonic()
        self._free.append(slot)
        if len(self._free) > MOST_FREE:
            await self._end_slot(self._free.popleft())
        elif self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle_slots)

    def _end_idle_slots(self) -> None:
        """End the slots that were free for a while; the first one has waited longest."""
        loop, long_ago = asyncio.get_running_loop(), time.monotonic() - IDLE_S
        while self._free and self._free[0].used_at <= long_ago:
            task = loop.create_task(self._end_slot(self._free.popleft()))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._idle_timer = loop.call_later(IDLE_S, self._end_idle_slots) if self._free else None

    async def _ready_slot(self, limits: Limits) -> Slot:
        server = await self._live_server()
        while True:
            is_new = not self._free
            slot = await self._make_slot(server) if is_new else self._free.popleft()
            try:
                await slot.wait_ready(limits)
            except BaseException as error:
                await self._end_slot(slot)
                if is_new or not isinstance(error, SandboxFailure):
                    raise
            else:
                return slot

    async def _make_slot(self, server: _ServerProcess) -> Slot:
        slot = Slot(await self._groups.acquire(Limits()))
        try:
            await slot.make(server.request_slot)
        except BaseException:
            await self._end_slot(slot)
            raise
        return slot

    async def _end_slot(self, slot: Slot) -> None:
        slot.close()
        with contextlib.suppress(SandboxFailure):  # then its group is not used again
            await self._groups.release(slot.group)

    async def _live_server(self) -> _ServerProcess:
        async with self._start_lock:
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    await asyncio.to_thread(self._server.close)
                self._server = None
                self._server = await self._start_server()
        return self._server

    async def _start_server(self) -> _ServerProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, Descriptors() as owned, theirs:
            undo.enter_context(ours)
            filter_ = owned.own(memory_file(self._filter))
            sources = source_files(owned, "isolation", "fork_server")
            arguments = [
                *(*system_mounts(), "--dir", SCRATCH, *file_mounts(sources)),
                *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", PROGRAM_PATH, "--"),
                *module_command("fork_server", f"{filter_}", *self._preload, python=self._python),
            ]
            process = self._bwrap.start(arguments, SERVER_LIMITS, [filter_, *sources.values()], theirs.fileno())
            undo.pop_all()
        server, is_ready, message = _ServerProcess(process, ours), False, ""
        try:
            is_ready = await server.wait_ready()
        finally:
            if not is_ready:
                message = await run_to_completion(asyncio.to_thread(server.close))
        if not is_ready:
            raise sandbox_not_made(message)
        return server


class _ServerProcess:
    """The running server."""

    def __init__(self, process: subprocess.Popen[bytes], requests: socket.socket) -> None:
        self._process = process
        self._requests = requests
        requests.setblocking(False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def wait_ready(self) -> bool:
        """Wait for its first packet; returns False if none comes."""
        try:
            async with timeout(READY_S):
                return bool(await asyncio.get_running_loop().sock_recv(self._requests, 16))
        except (TimeoutError, OSError):
            return False

    def request_slot(self, passed_fds: Sequence[int]) -> None:
        """Request a slot with these descriptors. Raises SandboxFailure ``sandbox-lost``."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed_fds))
        try:
            self._requests.sendmsg([b"1"], [rights])
        except OSError as error:
            raise sandbox_lost(f"The fork server accepts no request: {error}.") from error

    def close(self) -> str:
        """End it, and all that runs in it; returns its last message."""
        self._requests.close()
        message = last_message(self._process)
        end_bwrap(self._process)
        return message


def _request(program: PythonProgram, limits: Limits, *, has_groups: bool) -> bytes:
    check_room(program.files, limits)
    fallback = {} if has_groups else {f"RLIMIT_{name.upper()}": n for name, n in fallback_rlimits(limits).items()}
    request = msgspec.json.encode(
        {
            "code": program.code,
            "arguments": program.arguments,
            "files": {path: data.decode("latin-1") for path, data in program.files.items()},
            "environment": program_environment(program.environment),
            "disk_bytes": limits.disk_bytes,
            "inodes": INODES,
            "processors": sorted(choose_processors(limits.cpus) or ()),
            "rlimits": {
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_FSIZE": limits.file_bytes,
                "RLIMIT_CORE": 0,
                **fallback,
            },
        }
    )
    if len(request) > MOST_BYTES:
        raise SandboxFailure(
            f"Program and files have {len(request)} bytes; the limit is {MOST_BYTES}.",
            hint="Pass less data, or use a persistent sandbox, which takes files one by one.",
            kind="request-too-large",
            retryable=False,
        )
    return request

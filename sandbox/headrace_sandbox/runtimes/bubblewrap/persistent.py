"""A sandbox of bubblewrap that lives on: what it runs, its sessions and its files.

* Its process 1 is a keeper of ours (``guest/init.py``), which nothing inside can see, and which ends the sandbox at
  its time, and with the supervisor.
* Each command and each session has process ids of its own: its end is the end of all that it started, and of nothing
  else. Files, network, shared memory and limits are the sandbox's.
* The keeper is in a control group of its own, so that what runs inside cannot have it killed for memory.
* A reset makes all of it anew; nothing is taken over.
* A sandbox that is gone before its time is a fault of ours: nothing inside can end it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.bwrap import SCRATCH, SPARE_PIDS, Bwrap
from headrace_sandbox.host.cgroups import Cgroup, Groups, since
from headrace_sandbox.host.descriptors import Descriptors, is_readable, readable, refused_by_machine
from headrace_sandbox.host.watch import Started, ended, supervise, to_the_end
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import Command, Session, SessionKind, Template, not_offered
from headrace_sandbox.runtimes.shared import guest_programs
from headrace_sandbox.runtimes.shared.files import Files, WithFiles
from headrace_sandbox.runtimes.shared.outcome import processors, result_of, sandbox_lost, weak_limits
from headrace_sandbox.runtimes.shared.sessions import HostedSession, Parts

MODULES = ("isolation", "python_cells", "files", "session_host", "init")
"""What the keeper consists of."""

INODES = 10_000
"""Most files of a scratch folder: empty ones take no bytes of it, but memory of the kernel."""

KEEPER_LIMITS = Limits(pids=256, memory_bytes=96 << 20)
"""Of the keeper and the hosts of sessions together, which run nothing of a program's."""

OUTER_LIMITS = Limits(open_files=1024, file_bytes=1 << 40)
"""What programs inside have is less, and set for each."""

READY_S = 20.0
"""For the keeper to be there."""

MEET_S = 10.0
"""For what it starts to be there."""

END_S = 5.0
"""For what was killed to be gone; what is not waits in the kernel."""

CREDENTIALS = struct.Struct("3i")

END = struct.Struct("=II")
"""Wait status, and whether the scratch folder was full."""


class Surroundings(NamedTuple):
    """What the runtime has for its sandboxes. ``programs``: ``MODULES``, compiled, by where they are inside."""

    bwrap: Bwrap
    filter: bytes
    groups: Groups
    isolation: Isolation
    programs: Mapping[str, bytes]


class KeptSandbox(WithFiles):
    """The sandbox. ``id`` is not known inside."""

    def __init__(self, around: Surroundings, template: Template, ttl_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = around.isolation
        self._around = around
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._keeper: _Keeper | None = None
        self._sessions: set[HostedSession] = set()
        self._files = Files(self._do_with_files, template.limits.disk_bytes)
        self._is_closed = False

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        with refused_by_machine():
            await self._start()

    async def _start(self) -> None:
        left_s = self._deadline - time.monotonic()
        self._keeper = await _Keeper.start(self._around, self._template.limits, left_s)
        try:
            await self._files.put(self._template.files)
        except BaseException:
            await self._end_keeper()
            raise

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command; what it leaves is killed. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        await self._files.put(command.files)
        request = {
            "do": "command",
            "arguments": list(command.arguments),
            "environment": bwrap.environment({**self._template.environment, **command.environment}),
        }
        return await self._execute(request, command.stdin, limits, begun_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure."""
        if kind not in get_args(SessionKind):
            raise not_offered("bubblewrap", f"sessions of {kind}")
        request = {"do": "session", "kind": kind, "environment": bwrap.environment(self._template.environment)}

        async def start() -> _SessionHost:
            with refused_by_machine():
                return await self._alive().host(self._request(request))

        async def why_gone() -> str:
            raise self._gone() or sandbox_lost("The host of a session was killed from outside.")

        usage = self._alive().group.usage
        session = HostedSession(Parts(start, usage, why_gone, self.isolation))
        await session.start()
        self._sessions.add(session)
        return session

    async def reset(self) -> None:
        """Make it anew, for the time that it has left; its sessions are closed. Raises SandboxFailure."""
        self._alive()
        await self._end_keeper()
        await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self._is_closed = True
        await self._end_keeper()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left of it."""
        return self._is_closed

    async def _end_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        await to_the_end(self._end(keeper))

    async def _end(self, keeper: _Keeper | None) -> None:
        try:
            if keeper is not None:
                await keeper.end()
        finally:
            while self._sessions:
                await self._sessions.pop().close()

    async def _do_with_files(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        return await self._execute({"do": "files", **request}, content, limits, time.monotonic())

    async def _execute(self, request: dict[str, Any], stdin: bytes, limits: Limits, begun_at: float) -> ExecResult:
        keeper = self._alive()
        with refused_by_machine(), contextlib.ExitStack() as stack:
            inner, started = await keeper.start_program(self._request(request), stack)
            before = keeper.group.usage()
            started = started._replace(cpu_s=lambda: since(before, keeper.group.usage()).cpu_s)
            start_s = time.monotonic() - begun_at
            inner.go()
            verdict = await supervise(started, stdin, limits)
            usage = since(before, keeper.group.usage())
            await inner.gone()
            usage = msgspec.structs.replace(usage, disk_full=inner.disk_full)
        if verdict.returncode is None and (gone := inner.failure or self._gone()) is not None:
            raise gone
        return result_of(verdict, usage, start_s, self.isolation)

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._template.limits
        rlimits = {"nofile": limits.open_files, "fsize": limits.file_bytes, "core": 0}
        if not self._around.groups.driver.active:
            weak = weak_limits(limits)
            rlimits |= {**weak, "nproc": weak["nproc"] + SPARE_PIDS}
        return {**request, "rlimits": {f"RLIMIT_{name.upper()}": n for name, n in rlimits.items()}}

    def _alive(self) -> _Keeper:
        gone = self._gone()
        if gone is not None:
            raise gone
        assert self._keeper is not None
        return self._keeper

    def _gone(self) -> SandboxFailure | None:
        """Why it cannot be used, if it cannot."""
        if self._is_closed or self._keeper is None:
            return SandboxFailure("The sandbox was closed.", kind="closed", retryable=False)
        if time.monotonic() >= self._deadline:
            return SandboxFailure(
                "The sandbox's time is over.",
                hint="Open it with a larger ttl_s, or open another.",
                kind="expired",
                retryable=True,
            )
        if not self._keeper.lives:
            return sandbox_lost("The sandbox was ended from outside.")
        return None


class _Bounds(NamedTuple):
    """What all programs of a sandbox share: a control group, and the processors that they may use."""

    group: Cgroup
    processors: set[int] | None

    def admit(self, pid: int) -> None:
        """Bound a process, and what it will start; one that has ended is fine. Where the group has entries it is in it
        already. Raises OSError."""
        with contextlib.suppress(ProcessLookupError):
            if not self.group.entries:
                self.group.add(pid)
            if self.processors is not None:
                os.sched_setaffinity(pid, self.processors)


class _Keeper:
    """A keeper that runs. ``group`` bounds what it starts."""

    def __init__(self, process: subprocess.Popen[bytes], requests: socket.socket, pidfd: int, groups: Groups) -> None:
        self._process = process
        self._requests = requests
        self._pidfd = pidfd
        self._groups = groups
        self._bounds: _Bounds | None = None
        self._own_group: Cgroup | None = None

    @classmethod
    async def start(cls, around: Surroundings, limits: Limits, ttl_s: float) -> _Keeper:
        """Start one. Raises SandboxFailure."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        with contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            with theirs:
                process = _start_keeper(around, limits, ttl_s, theirs)
            undo.pop_all()
        pidfd = None
        try:
            pidfd = await _met(ours, b"ready", READY_S)
            if pidfd is None:
                raise bwrap.not_made(_said(process))
        finally:
            if pidfd is None:
                ours.close()
                await to_the_end(asyncio.to_thread(bwrap.reap, process))
        keeper = cls(process, ours, pidfd, around.groups)
        try:
            keeper._bounds = _Bounds(await around.groups.taken(limits), processors(limits.cpus))
            keeper._own_group = await around.groups.taken(KEEPER_LIMITS)
            await asyncio.to_thread(keeper._own_group.add, _pid_of(pidfd))
        except BaseException:
            await to_the_end(keeper.end())
            raise
        return keeper

    @property
    def group(self) -> Cgroup:
        """What bounds its programs."""
        assert self._bounds is not None
        return self._bounds.group

    @property
    def lives(self) -> bool:
        return not is_readable(self._pidfd)

    async def start_program(self, request: dict[str, Any], stack: contextlib.ExitStack) -> tuple[_Inner, Started]:
        """Start what a request asks for, with pipes. It is bounded, and waits to be let go. Raises SandboxFailure
        ``sandbox-lost``."""
        with Descriptors() as made:
            (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = made.pipe(), made.pipe(), made.pipe()
            inner = self._ask(request, [stdin, stdout, stderr], stack)
            made.close(stdin, stdout, stderr)  # so that output ends with the program
            pidfd = await inner.met()
            inner.go()
            await inner.joined()
            end = os.dup(inner.end)
            made.give(our_stdin, our_stdout, our_stderr)
        started = Started(
            stdin=our_stdin,
            stdout=our_stdout,
            stderr=our_stderr,
            end=end,
            returncode=lambda: inner.status,
            kill=lambda: bwrap.kill(pidfd),
            cpu_s=lambda: None,
        )
        return inner, started

    async def host(self, request: dict[str, Any]) -> _SessionHost:
        """Start the host of a session. Raises SandboxFailure ``sandbox-lost``."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(ours.close)
            with theirs:
                inner = self._ask(request, [theirs.fileno()], stack)
            pidfd = await inner.met()
            inner.lets_all_go = True
            inner.go()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return _SessionHost(reader, writer, pidfd, stack.pop_all())

    def _ask(self, request: dict[str, Any], handed: Sequence[int], stack: contextlib.ExitStack) -> _Inner:
        """Send a request, with these descriptors."""
        assert self._bounds is not None
        with Descriptors() as made:
            inner, theirs = _Inner.make(self._bounds, stack)
            made.own(theirs)
            entries = [made.own(os.open(path, os.O_WRONLY)) for path in self.group.entries]
            content = made.own(bwrap.memory_file(json.dumps({**request, "group_entries": len(entries)}).encode()))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [content, theirs, *entries, *handed]))
            try:
                self._requests.sendmsg([b"r"], [rights])
            except OSError as error:
                raise sandbox_lost(f"The sandbox takes no request: {error.strerror}.") from error
        return inner

    async def end(self) -> None:
        """End it, and all that runs in it. Raises SandboxFailure ``unkillable``."""
        bwrap.kill(self._pidfd)
        self._process.kill()
        try:
            await ended(self._pidfd, END_S)
            await asyncio.to_thread(bwrap.reap, self._process)
            for group in (self._bounds and self._bounds.group, self._own_group):
                if group is not None:
                    await self._groups.given_back(group)
        finally:
            self._requests.close()
            os.close(self._pidfd)


def _start_keeper(
    around: Surroundings, limits: Limits, ttl_s: float, requests: socket.socket
) -> subprocess.Popen[bytes]:
    outer = Limits(
        pids=limits.pids + KEEPER_LIMITS.pids,
        open_files=OUTER_LIMITS.open_files,
        file_bytes=OUTER_LIMITS.file_bytes,
    )
    with Descriptors() as made:
        filter_ = made.own(bwrap.memory_file(around.filter))
        sources = {path: made.own(bwrap.memory_file(code)) for path, code in around.programs.items()}
        arguments = [
            *(*bwrap.system(), "--dir", SCRATCH, "--dir", "/session", *guest_programs.mounts(sources)),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--as-pid-1"),
            *("--setenv", "PATH", bwrap.PROGRAM_PATH, "--"),
            *guest_programs.command("init", f"{filter_}", f"{ttl_s}", f"{limits.disk_bytes}", f"{INODES}"),
        ]
        return around.bwrap.start(arguments, outer, [filter_, *sources.values()], requests.fileno())


class _Inner:
    """What a keeper started: its process 1, and those that want to be bounded. ``end`` is a descriptor that becomes
    readable when its program ended, or when nobody is left to tell; ``status`` is then how, or None, and ``disk_full``
    whether it failed with a full scratch folder. ``lets_all_go``: whoever wants to be bounded goes on once it is; else
    it waits for ``go``."""

    def __init__(self, ours: socket.socket, bounds: _Bounds, stack: contextlib.ExitStack) -> None:
        self.end = os.eventfd(0)
        self.status: int | None = None
        self.disk_full = False
        self.failure: SandboxFailure | None = None
        self.lets_all_go = False
        self._socket = ours
        self._bounds = bounds
        self._stack = stack
        self._loop = asyncio.get_running_loop()
        self._admitting: asyncio.Task[None] | None = None
        self._first: asyncio.Future[int | None] = self._loop.create_future()
        self._joined: asyncio.Future[bool | None] = self._loop.create_future()
        self._loop.add_reader(ours, self._hear)
        stack.callback(self._close)

    @classmethod
    def make(cls, bounds: _Bounds, stack: contextlib.ExitStack) -> tuple[_Inner, int]:
        """One, and the other end of its socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        try:
            return cls(ours, bounds, stack), theirs.detach()
        except BaseException:
            ours.close()
            theirs.close()
            raise

    async def met(self) -> int:
        """A descriptor of its process 1, which waits to be let go. Raises SandboxFailure ``sandbox-lost``."""
        with contextlib.suppress(TimeoutError):
            async with timeout(MEET_S):
                if (pidfd := await self._first) is not None:
                    return pidfd
        raise sandbox_lost("The sandbox was lost while something began in it.")

    async def joined(self) -> None:
        """Its program is bounded, and waits to be let go. Raises SandboxFailure ``sandbox-lost``."""
        with contextlib.suppress(TimeoutError):
            async with timeout(MEET_S):
                if await self._joined:
                    return
        raise self.failure or sandbox_lost("The sandbox was lost while something began in it.")

    def go(self) -> None:
        """Let it go."""
        with contextlib.suppress(OSError):  # it is gone, or was closed, and will be found so
            self._socket.send(b"1")

    async def gone(self) -> None:
        """Wait until nothing of it is left. Raises SandboxFailure ``unkillable``."""
        pidfd = self._first.result()
        assert pidfd is not None
        await ended(pidfd, END_S)

    def _hear(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return
        except ConnectionError:
            data, ancillary = b"", []
        if data == b"first" and not self._first.done():
            pidfd = _opened(_sender(ancillary))
            if pidfd is not None:
                self._stack.callback(os.close, pidfd)
            self._first.set_result(pidfd)
        elif data == b"member":
            self._admitting = self._loop.create_task(self._admit(_sender(ancillary)))
        elif data == b"outside":
            self._refuse("it did not come into its control group")
        elif len(data) == END.size:
            status, full = END.unpack(data)
            self.status, self.disk_full = os.waitstatus_to_exitcode(status), bool(full)
            os.eventfd_write(self.end, 1)
        elif not data:
            self._loop.remove_reader(self._socket)
            for future in (self._first, self._joined):
                if not future.done():
                    future.set_result(None)
            os.eventfd_write(self.end, 1)

    async def _admit(self, pid: int) -> None:
        try:
            if self._bounds.group.entries:
                self._bounds.admit(pid)
            else:
                await asyncio.to_thread(self._bounds.admit, pid)  # it waits for the kernel
        except OSError as error:
            self._refuse(f"{error}")
            return
        if self.lets_all_go:
            self.go()
        elif not self._joined.done():
            self._joined.set_result(True)

    def _refuse(self, why: str) -> None:
        """Nothing runs unbounded."""
        self.failure = sandbox_lost(f"A program could not be bounded: {why}.")
        if (pidfd := self._first.result()) is not None:
            bwrap.kill(pidfd)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        os.close(self.end)


class _SessionHost:
    """The host of a session, process 1 of its own."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pidfd: int, stack: contextlib.ExitStack
    ) -> None:
        self.reader, self.writer = reader, writer
        self._pidfd = pidfd
        self._stack = stack

    async def end(self) -> None:
        """Kill it, and all that it started."""
        with self._stack:
            bwrap.kill(self._pidfd)
            self.writer.close()
            await ended(self._pidfd, END_S)
            with contextlib.suppress(ConnectionError):
                await self.writer.wait_closed()


async def _met(socket_: socket.socket, word: bytes, within_s: float) -> int | None:
    """A descriptor of the process that says this; None if none does."""
    try:
        async with timeout(within_s):
            await readable(socket_.fileno())
        data, ancillary, _, _ = socket_.recvmsg(16, socket.CMSG_SPACE(CREDENTIALS.size))
    except (TimeoutError, OSError):
        return None
    return _opened(_sender(ancillary)) if data == word else None


def _sender(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """Who sent a message, as this machine numbers processes; 0 if that is not known."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid: int = CREDENTIALS.unpack(data)[0]
            return pid
    return 0


def _opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        return None


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _said(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return (process.stderr.read() or b"").decode(errors="replace").strip()

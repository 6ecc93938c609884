"""A container that lives on: what it runs, its sessions and its files.

* One command, or one thing done with files, at a time; sessions run beside them. Others wait, and that is no time of
  theirs.
* What a command leaves in the background is killed when it ends; what a session started lives as long as the session.
* A command that cannot be killed inside, or that uses up the memory, loses its sandbox, and every later call says so.
* A reset is a new container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.watch import to_the_end
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.base import Command, Session, SessionKind, Template
from headrace_sandbox.runtimes.docker.container import Image
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, NotRunning, Streams
from headrace_sandbox.runtimes.docker.exec import Brought, Container, told, unkillable
from headrace_sandbox.runtimes.docker.guest_files import begin, check_size, module, not_put, require, unpack, variables
from headrace_sandbox.runtimes.docker.watch import STDOUT, Frames
from headrace_sandbox.runtimes.shared.files import Files, WithFiles
from headrace_sandbox.runtimes.shared.sessions import HostedSession, Parts

BESIDE = ("isolation", "python_cells", "session_host", "exec_host")
"""The modules of ``guest/exec_host.py``, each after those that it imports."""

HELLO_S = 30.0
"""For the host of a session to be there."""

GOODBYE_S = 3.0
"""For a host to end what it started, and itself."""

CLEARINGS = 3

PUT_LIMITS = Limits(wall_s=60.0, kept_bytes=4096, output_bytes=1 << 20)


class DockerSandbox(WithFiles):
    """The sandbox. ``make`` makes containers of its template; ``given_up`` gets those that could not be ended."""

    def __init__(
        self,
        make: Callable[[float], Container],
        image: Image,
        template: Template,
        isolation: Isolation,
        ttl_s: float,
        given_up: Callable[[Container], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = isolation
        self._make = make
        self._image = image
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._given_up = given_up
        self._container: Container | None = None
        self._one = asyncio.Lock()
        self._hosts: set[_Host] = set()
        self._sessions: set[HostedSession] = set()
        self._lost: str | None = None
        self._files = Files(self._do_with_files, template.limits.disk_bytes)
        self.is_closed = False

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        container = self._container = self._make(self._deadline - time.monotonic())
        try:
            await container.make()
            await container.start()
            if self._template.files:
                await self._put(self._template.files)
        except BaseException:
            await self._end_container()
            raise

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command; what it leaves is killed. Raises SandboxFailure; cancelling the call kills it."""
        asked_at = time.monotonic()
        given = {**self._template.environment, **command.environment}
        check_size(command.arguments, given)
        async with self._one:
            begun_at = time.monotonic()
            if command.files and "python3" in self._image.programs:
                brought = begin(command.files, command.arguments)
                brought = brought._replace(stdin=brought.stdin + command.stdin)
            else:
                if command.files:
                    await self._put(command.files)
                brought = Brought(command.arguments, command.stdin)
            result = await self._run(brought._replace(variables=variables(given)), limits, begun_at)
        return msgspec.structs.replace(result, queue_s=begun_at - asked_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure; ``image-unfit`` where the image has no Python, or no bash for one."""
        require(self._image, "python3", "sessions")
        if kind == "bash":
            require(self._image, "bash", "sessions of bash")
        container = self._alive()
        session = HostedSession(Parts(lambda: self._host(kind), container.usage, self._why_gone, self.isolation))
        await session.start()
        self._sessions.add(session)
        return session

    async def reset(self) -> None:
        """Make it anew, for the time that it has left; its sessions are closed. Raises SandboxFailure."""
        async with self._one:
            self._alive()
            await self._end_container()
            await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self.is_closed = True
        await self._end_container()

    async def _run(self, brought: Brought, limits: Limits, begun_at: float) -> ExecResult:
        if self._lost is not None:
            return _lost(self._lost, self.isolation)
        container = self._alive()
        beside = bool(self._hosts)
        try:
            ended = await container.run(brought, limits, [self._kill_command, container.kill], beside=beside)
        except BaseException:
            await to_the_end(self._after(container, is_clean=False))
            raise
        if ended.lost is None:
            is_clean = not beside and ended.seen.limit is None and (ended.returncode or 0) >= 0
            ended = ended._replace(lost=await self._after(container, is_clean=is_clean))
        self._lost = ended.lost
        return told(container, ended, begun_at, self.isolation)

    async def _after(self, container: Container, *, is_clean: bool) -> str | None:
        """See to it that nothing of a command is left; why the sandbox is lost where that cannot be."""
        if is_clean:
            return None  # the shell that waited for it has seen to it
        with contextlib.suppress(SandboxFailure):
            for _ in range(CLEARINGS):
                if await self._clear():
                    return None
        await container.kill()
        return "What it left in the background could not be ended, and its sandbox was ended with it."

    async def _kill_command(self) -> None:
        with contextlib.suppress(SandboxFailure):
            await self._clear()

    async def _clear(self) -> bool:
        """Kill all that belongs to no session; whether nothing of it is left. Raises SandboxFailure."""
        container = self._container
        if container is None:
            return True
        if not self._hosts:
            await container.kill_programs()
            return await container.is_clear()
        try:
            return await container.does(module(BESIDE, ["clear", *(str(host.pid) for host in self._hosts)]))
        except NotRunning:
            return True  # all of it ended

    async def _put(self, files: Any) -> None:
        if "python3" in self._image.programs:
            brought = begin(files, ["true"])
        else:
            require(self._image, "tar", "files")
            brought = unpack(files)
        container = self._alive()
        put = await container.run(brought, PUT_LIMITS, [container.kill], beside=bool(self._hosts))
        if put.returncode != 0:
            raise not_put(put)

    async def _do_with_files(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        require(self._image, "python3", "reading and writing files")
        brought = module(["files"], [".", json.dumps(request)])
        async with self._one:
            if self._lost is not None:
                raise lost_by_program(self._lost)
            return await self._run(brought._replace(stdin=brought.stdin + content), limits, time.monotonic())

    # Sessions ---------------------------------------------------------------------------------------------------------

    async def _host(self, kind: SessionKind) -> _Host:
        if self._lost is not None:
            raise lost_by_program(self._lost)
        given = {"HOME": "/scratch", "LANG": "C.UTF-8", **self._template.environment}
        request = json.dumps({"kind": kind, "environment": given})
        brought = module(BESIDE, ["host", request, f"/tmp/.session-{uuid.uuid4().hex}"])
        async with self._one:  # a command that ends would take it with it
            container = self._alive()
            try:
                host = _Host(await container.talk(brought), self._gone_host)
                await host.hello()
            except NotRunning:
                self._lost = await container.why_gone()
                raise lost_by_program(self._lost) from None
            self._hosts.add(host)
        return host

    async def _gone_host(self, host: _Host) -> None:
        """What a session's host started is killed, if the host could not."""
        self._hosts.discard(host)
        if not self._one.locked() and not self.is_closed:
            async with self._one:
                await self._clear()

    async def _why_gone(self) -> str:
        """Why a session's host is gone. Raises SandboxFailure where nothing inside could end it."""
        container = self._alive()
        if await container.is_alive():
            return "The session's host was killed from inside its sandbox."
        self._lost = await container.why_gone()
        return self._lost

    # The container ----------------------------------------------------------------------------------------------------

    def _alive(self) -> Container:
        if self.is_closed or self._container is None:
            raise SandboxFailure("The sandbox was closed.", kind="closed", retryable=False)
        if time.monotonic() >= self._deadline:
            raise SandboxFailure(
                "The sandbox's time is over.",
                hint="Open it with a larger ttl_s, or open another.",
                kind="expired",
                retryable=True,
            )
        return self._container

    async def _end_container(self) -> None:
        container, self._container = self._container, None
        self._lost = None
        try:
            if container is not None and not await to_the_end(container.remove()):
                self._given_up(container)
                raise unkillable()
        finally:
            while self._sessions:
                await self._sessions.pop().close()
            self._hosts.clear()


class _Host:
    """The host of a session. ``pid`` is its number inside."""

    def __init__(self, streams: Streams, gone: Callable[[_Host], Awaitable[None]]) -> None:
        self.reader = asyncio.StreamReader()
        self.writer = streams.writer
        self.pid = 0
        self._streams = streams
        self._gone = gone
        self._reading = asyncio.create_task(self._read())

    async def hello(self) -> None:
        """Wait until it is there. Raises SandboxFailure ``sandbox-not-made``."""
        try:
            async with timeout(HELLO_S):
                line = await self.reader.readline()
            self.pid = int(line)
        except BaseException as error:
            self._reading.cancel()
            self._streams.end()
            if not isinstance(error, TimeoutError | ValueError):
                raise
            raise SandboxFailure(
                "The host of a session did not start.", kind="sandbox-not-made", retryable=True
            ) from error

    async def end(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write_eof()
        await asyncio.wait([self._reading], timeout=GOODBYE_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._streams.end()
        await self._gone(self)

    async def _read(self) -> None:
        frames = Frames(self._take)
        with contextlib.suppress(ConnectionError):
            while data := await self._streams.reader.read(READ_BYTES):
                frames.feed(data)
        self.reader.feed_eof()

    def _take(self, stream: int, data: bytes) -> None:
        if stream == STDOUT:
            self.reader.feed_data(data)


def lost_by_program(why: str) -> SandboxFailure:
    """The failure of what cannot be done any more because of what a program did to its sandbox."""
    return SandboxFailure(f"The sandbox was lost by its program: {why}", kind="lost-by-program", retryable=False)


def _lost(why: str, isolation: Isolation) -> ExecResult:
    return ExecResult(
        exit_code=None,
        signal=None,
        stdout=Output(),
        stderr=Output(),
        limit=None,
        wall_s=0.0,
        start_s=0.0,
        lost=why,
        usage=Usage(),
        isolation=isolation,
    )

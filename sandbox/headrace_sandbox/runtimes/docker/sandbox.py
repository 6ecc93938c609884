"""A persistent sandbox in a container: its commands, its sessions and its files.

* One command or one file request runs at a time, beside the sessions. Others wait, which does not count as their own
  time.
* A command's background processes are killed at its end; those of a session live as long as the session.
* A command that cannot be killed inside, or uses up the memory, loses its sandbox, and every later call says so.
* A reset makes a new container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import SandboxCommand, Session, SessionKind, Template
from headrace_sandbox.runtimes.docker.container import DockerContainer, container_result, container_unkillable
from headrace_sandbox.runtimes.docker.container_settings import DockerImage
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, NotRunning, Streams
from headrace_sandbox.runtimes.docker.exec_programs import (
    ExecProgram,
    check_size,
    files_not_written,
    module_program,
    program_variables,
    program_with_files,
    require_program,
    unpacking_program,
)
from headrace_sandbox.runtimes.docker.stream_watch import STDOUT, StreamFrameReader
from headrace_sandbox.runtimes.shared.exec_result import lost_result, sandbox_closed, sandbox_expired
from headrace_sandbox.runtimes.shared.files import FileCalls, SandboxFiles
from headrace_sandbox.runtimes.shared.sessions import HostedSession, SessionBackend

SESSION_MODULES = ("isolation", "python_cells", "session_host", "exec_host")
"""``guest/exec_host.py``, after the modules that it imports."""

HOST_START_S = 30.0
"""Deadline for a session host to report its start."""

HOST_END_S = 3.0
"""Deadline for a session host to end its processes, and itself."""

CLEARINGS = 3
"""Tries to kill the background processes of a command."""

WRITE_LIMITS = Limits(wall_s=60.0, kept_bytes=4096, output_bytes=1 << 20)
"""The limits of a program that writes files."""


class DockerSandbox(FileCalls):
    """The sandbox. ``make_container`` makes containers of its template, for a number of seconds; ``on_unkillable``
    receives those that could not be ended."""

    def __init__(
        self,
        make_container: Callable[[float], DockerContainer],
        image: DockerImage,
        template: Template,
        isolation: Isolation,
        ttl_s: float,
        on_unkillable: Callable[[DockerContainer], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = isolation
        self._make_container = make_container
        self._image = image
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._on_unkillable = on_unkillable
        self._container: DockerContainer | None = None
        self._lock = asyncio.Lock()
        self._hosts: set[DockerSessionHost] = set()
        self._sessions: set[HostedSession] = set()
        self._lost: str | None = None
        self._files = SandboxFiles(self._run_file_request, template.limits.disk_bytes)
        self.is_closed = False

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        container = self._container = self._make_container(self._deadline - time.monotonic())
        try:
            await container.make()
            await container.start()
            if self._template.files:
                await self._write_files(self._template.files)
        except BaseException:
            await self._end_container()
            raise

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command; its background processes are killed. Raises SandboxFailure; cancelling the call kills it."""
        called_at = time.monotonic()
        variables = {**self._template.environment, **command.environment}
        check_size(command.arguments, variables)
        async with self._lock:
            started_at = time.monotonic()
            if command.files and "python3" in self._image.programs:
                program = program_with_files(command.files, command.arguments)
                program = program._replace(stdin=program.stdin + command.stdin)
            else:
                if command.files:
                    await self._write_files(command.files)
                program = ExecProgram(command.arguments, command.stdin)
            result = await self._run(program._replace(variables=program_variables(variables)), limits, started_at)
        return msgspec.structs.replace(result, queue_s=started_at - called_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure; ``image-unfit`` where the image has no Python, or no bash for one."""
        require_program(self._image, "python3", "sessions")
        if kind == "bash":
            require_program(self._image, "bash", "sessions of bash")
        container = self._require_container()
        backend = SessionBackend(
            lambda: self._start_host(kind),
            container.usage,
            self._why_host_ended,
            self.isolation,
            container.threads,
            self._template.limits.cpus,
        )
        session = HostedSession(backend)
        await session.start()
        self._sessions.add(session)
        return session

    async def reset(self) -> None:
        """Recreate it for the rest of its time; its sessions are closed. Raises SandboxFailure."""
        async with self._lock:
            self._require_container()
            await self._end_container()
            await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self.is_closed = True
        await self._end_container()

    async def _run(self, program: ExecProgram, limits: Limits, started_at: float) -> ExecResult:
        if self._lost is not None:
            return lost_result(self._lost, self.isolation)
        container = self._require_container()
        beside = bool(self._hosts)
        limits = msgspec.structs.replace(limits, cpus=self._template.limits.cpus)
        try:
            outcome = await container.run(program, limits, [self._kill_command, container.kill], beside=beside)
        except BaseException:
            await run_to_completion(self._end_command(container, is_clean=False))
            raise
        if outcome.lost is None:
            is_clean = not beside and outcome.streams.limit is None and (outcome.returncode or 0) >= 0
            outcome = outcome._replace(lost=await self._end_command(container, is_clean=is_clean))
        self._lost = outcome.lost
        return container_result(container, outcome, started_at, self.isolation)

    async def _end_command(self, container: DockerContainer, *, is_clean: bool) -> str | None:
        """Kill every process of a command; returns the reason if the sandbox is lost because that is not possible."""
        if is_clean:
            return None  # the shell that waited for the command has killed them
        with contextlib.suppress(SandboxFailure):
            for _ in range(CLEARINGS):
                if await self._kill_outside_sessions():
                    return None
        await container.kill()
        return "Its background processes could not be ended, and its sandbox was ended with them."

    async def _kill_command(self) -> None:
        with contextlib.suppress(SandboxFailure):
            await self._kill_outside_sessions()

    async def _kill_outside_sessions(self) -> bool:
        """Kill all processes that belong to no session; returns True once they are gone. Raises SandboxFailure."""
        container = self._container
        if container is None:
            return True
        if not self._hosts:
            await container.kill_programs()
            return await container.kill_until_clear()
        pids = [str(host.pid) for host in self._hosts]
        try:
            return await container.succeeds(module_program(SESSION_MODULES, ["clear", *pids]))
        except NotRunning:
            return True  # the whole container has ended

    async def _write_files(self, files: Mapping[str, bytes]) -> None:
        if "python3" in self._image.programs:
            program = program_with_files(files, ["true"])
        else:
            require_program(self._image, "tar", "files")
            program = unpacking_program(files)
        container = self._require_container()
        write_outcome = await container.run(program, WRITE_LIMITS, [container.kill], beside=bool(self._hosts))
        if write_outcome.returncode != 0:
            raise files_not_written(write_outcome.streams.stderr.text)

    async def _run_file_request(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        require_program(self._image, "python3", "reading and writing files")
        program = module_program(["files"], [".", json.dumps(request)])
        async with self._lock:
            if self._lost is not None:
                raise lost_by_program(self._lost)
            return await self._run(program._replace(stdin=program.stdin + content), limits, time.monotonic())

    # Sessions ---------------------------------------------------------------------------------------------------------

    async def _start_host(self, kind: SessionKind) -> DockerSessionHost:
        if self._lost is not None:
            raise lost_by_program(self._lost)
        variables = {"HOME": "/scratch", "LANG": "C.UTF-8", **self._template.environment}
        request = json.dumps({"kind": kind, "environment": variables})
        program = module_program(SESSION_MODULES, ["host", request, f"/tmp/.session-{uuid.uuid4().hex}"])
        async with self._lock:  # the end of a command would kill it meanwhile
            container = self._require_container()
            try:
                host = DockerSessionHost(await container.connect(program), self._host_ended)
                await host.wait_started()
            except NotRunning:
                self._lost = await container.why_gone()
                raise lost_by_program(self._lost) from None
            self._hosts.add(host)
        return host

    async def _host_ended(self, host: DockerSessionHost) -> None:
        """Kill the processes of a session whose host could not."""
        self._hosts.discard(host)
        if not self._lock.locked() and not self.is_closed:
            async with self._lock:
                await self._kill_outside_sessions()

    async def _why_host_ended(self) -> str:
        """The reason of a session host's end. Raises SandboxFailure if no program inside could end it."""
        container = self._require_container()
        if await container.is_alive():
            return "The session's host was killed from inside its sandbox."
        self._lost = await container.why_gone()
        return self._lost

    # The container ----------------------------------------------------------------------------------------------------

    def _require_container(self) -> DockerContainer:
        if self.is_closed or self._container is None:
            raise sandbox_closed()
        if time.monotonic() >= self._deadline:
            raise sandbox_expired()
        return self._container

    async def _end_container(self) -> None:
        container, self._container = self._container, None
        self._lost = None
        try:
            if container is not None and not await run_to_completion(container.remove()):
                self._on_unkillable(container)
                raise container_unkillable()
        finally:
            while self._sessions:
                await self._sessions.pop().close()
            self._hosts.clear()


class DockerSessionHost:
    """The host of a session. ``pid`` is its process id inside."""

    def __init__(self, streams: Streams, on_end: Callable[[DockerSessionHost], Awaitable[None]]) -> None:
        self.reader = asyncio.StreamReader()
        self.writer = streams.writer
        self.pid = 0
        self._streams = streams
        self._on_end = on_end
        self._reading = asyncio.create_task(self._read())

    async def wait_started(self) -> None:
        """Wait for its first line, which is its process id. Raises SandboxFailure ``sandbox-not-made``."""
        try:
            async with timeout(HOST_START_S):
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
        await asyncio.wait([self._reading], timeout=HOST_END_S)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._streams.end()
        await self._on_end(self)

    async def _read(self) -> None:
        frames = StreamFrameReader(self._receive)
        with contextlib.suppress(ConnectionError):
            while data := await self._streams.reader.read(READ_BYTES):
                frames.feed(data)
        self.reader.feed_eof()

    def _receive(self, stream: int, data: bytes) -> None:
        if stream == STDOUT:
            self.reader.feed_data(data)


def lost_by_program(reason: str) -> SandboxFailure:
    """The failure of a call to a sandbox that one of its programs lost."""
    return SandboxFailure(f"The sandbox was lost by its program: {reason}", kind="lost-by-program", retryable=False)

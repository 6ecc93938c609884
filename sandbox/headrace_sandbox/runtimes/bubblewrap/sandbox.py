"""A persistent sandbox of bubblewrap: its commands, its sessions and its files.

* Each command and each session has process ids of its own: its end is the end of all that it started, and of nothing
  else. Files, network, shared memory and limits are the sandbox's.
* A reset recreates the whole sandbox; nothing is kept.
* A sandbox that ends before its time is a fault of ours: no program inside can end it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any, get_args

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import usage_between
from headrace_sandbox.host.descriptors import os_errors_as_failures
from headrace_sandbox.host.layout import program_environment
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.watch import watch_program
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import SandboxCommand, Session, SessionKind, Template, not_offered
from headrace_sandbox.runtimes.bubblewrap.bwrap import SPARE_PIDS
from headrace_sandbox.runtimes.bubblewrap.init_process import BubblewrapResources, BubblewrapSessionHost, InitProcess
from headrace_sandbox.runtimes.shared.exec_result import (
    exec_result,
    fallback_rlimits,
    sandbox_closed,
    sandbox_expired,
    sandbox_lost,
)
from headrace_sandbox.runtimes.shared.files import FileCalls, SandboxFiles
from headrace_sandbox.runtimes.shared.sessions import HostedSession, SessionBackend


class BubblewrapSandbox(FileCalls):
    """The sandbox. ``id`` is not known inside."""

    def __init__(self, resources: BubblewrapResources, template: Template, ttl_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.isolation = resources.isolation
        self._resources = resources
        self._template = template
        self._deadline = time.monotonic() + ttl_s
        self._init: InitProcess | None = None
        self._sessions: set[HostedSession] = set()
        self._files = SandboxFiles(self._run_file_request, template.limits.disk_bytes)
        self._is_closed = False

    async def start(self) -> None:
        """Make it. Raises SandboxFailure."""
        with os_errors_as_failures():
            left_s = self._deadline - time.monotonic()
            self._init = await InitProcess.start(self._resources, self._template.limits, left_s)
            try:
                await self._files.put(self._template.files)
            except BaseException:
                await self._end_init()
                raise

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command; its background processes are killed. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        await self._files.put(command.files)
        request = {
            "do": "command",
            "arguments": list(command.arguments),
            "environment": program_environment({**self._template.environment, **command.environment}),
        }
        return await self._execute(request, command.stdin, limits, started_at)

    async def session(self, kind: SessionKind) -> Session:
        """A new session. Raises SandboxFailure."""
        if kind not in get_args(SessionKind):
            raise not_offered("bubblewrap", f"sessions of {kind}")
        request = {"do": "session", "kind": kind, "environment": program_environment(self._template.environment)}

        async def start_host() -> BubblewrapSessionHost:
            with os_errors_as_failures():
                return await self._require_init().start_session_host(self._request(request))

        async def why_gone() -> str:
            raise self._failure() or sandbox_lost("The host of a session was killed from outside.")

        group = self._require_init().group
        cpus = self._template.limits.cpus
        session = HostedSession(SessionBackend(start_host, group.usage, why_gone, self.isolation, group.threads, cpus))
        await session.start()
        self._sessions.add(session)
        return session

    async def reset(self) -> None:
        """Recreate it for the rest of its time; its sessions are closed. Raises SandboxFailure."""
        self._require_init()
        await self._end_init()
        await self.start()

    async def close(self) -> None:
        """End it; nothing of it is left. Raises SandboxFailure ``unkillable``."""
        self._is_closed = True
        await self._end_init()

    @property
    def is_closed(self) -> bool:
        """True once it was closed."""
        return self._is_closed

    async def _end_init(self) -> None:
        init, self._init = self._init, None
        await run_to_completion(self._end(init))

    async def _end(self, init: InitProcess | None) -> None:
        try:
            if init is not None:
                await init.end()
        finally:
            while self._sessions:
                await self._sessions.pop().close()

    async def _run_file_request(self, request: dict[str, Any], content: bytes, limits: Limits) -> ExecResult:
        return await self._execute({"do": "files", **request}, content, limits, time.monotonic())

    async def _execute(self, request: dict[str, Any], stdin: bytes, limits: Limits, started_at: float) -> ExecResult:
        init = self._require_init()
        limits = msgspec.structs.replace(limits, cpus=self._template.limits.cpus)
        with os_errors_as_failures(), contextlib.ExitStack() as stack:
            inner, running = await init.start_program(self._request(request), stack)
            before = init.group.usage()
            start_s = time.monotonic() - started_at
            inner.go()
            outcome = await watch_program(running, stdin, limits)
            usage = usage_between(before, init.group.usage())
            await inner.wait_for_exit()
            usage = msgspec.structs.replace(usage, disk_full=inner.disk_full)
        if outcome.returncode is None and (failure := inner.failure or self._failure()) is not None:
            raise failure
        return exec_result(outcome, usage, start_s, self.isolation)

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._template.limits
        rlimits = {"nofile": limits.open_files, "fsize": limits.file_bytes, "core": 0}
        if not self._resources.groups.driver.active:
            fallback = fallback_rlimits(limits)
            rlimits |= {**fallback, "nproc": fallback["nproc"] + SPARE_PIDS}
        return {**request, "rlimits": {f"RLIMIT_{name.upper()}": n for name, n in rlimits.items()}}

    def _require_init(self) -> InitProcess:
        failure = self._failure()
        if failure is not None:
            raise failure
        assert self._init is not None
        return self._init

    def _failure(self) -> SandboxFailure | None:
        """The reason that it cannot be used, or None."""
        if self._is_closed or self._init is None:
            return sandbox_closed()
        if time.monotonic() >= self._deadline:
            return sandbox_expired()
        if not self._init.is_alive:
            return sandbox_lost("The sandbox was ended from outside.")
        return None

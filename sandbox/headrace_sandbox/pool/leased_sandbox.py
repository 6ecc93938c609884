"""A leased sandbox of the pool.

* After the end of the lease no call reaches the sandbox; a running call ends with a failure of ours.
* A result that reports the sandbox as lost, or a failure of the runtime, makes the sandbox suspicious.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from headrace.errors import SandboxFailure
from headrace_sandbox.pool.instructions import LeaseSandbox
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import FileInfo, Sandbox, SandboxCommand, Session, SessionKind

T = TypeVar("T")

HARMLESS_KINDS = frozenset(
    {
        "archive-too-large",
        "bad-archive",
        "bad-path",
        "disk-full",
        "file-too-large",
        "no-such-file",
        "not-offered",
        "too-many-entries",
    }
)
"""Failures that do not make a sandbox suspicious."""


class LeaseManager(Protocol):
    """Interface of the pool that a leased sandbox returns to."""

    def give_back(self, lease: str, reusable: bool) -> None: ...

    def renew(self, lease: str, ttl_s: float) -> float: ...


class LeasedSandbox:
    """A ``Sandbox``. ``queue_s`` and ``start_s``: the time until one was free, and the time to make or reset it.
    ``ttl_s``: the granted time of the lease."""

    def __init__(self, manager: LeaseManager, instruction: LeaseSandbox, sandbox: Sandbox) -> None:
        self.id = instruction.lease
        self.queue_s, self.start_s, self.ttl_s = instruction.queue_s, instruction.start_s, instruction.ttl_s
        self.isolation = sandbox.isolation
        self._manager = manager
        self._sandbox = sandbox
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._is_suspicious = False

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return await self.call_for_result(self._sandbox.run(command, limits))

    async def session(self, kind: SessionKind) -> Session:
        return LeasedSession(self, await self.call(self._sandbox.session(kind)))

    async def read(self, path: str, most_bytes: int) -> bytes:
        return await self.call(self._sandbox.read(path, most_bytes))

    async def write(self, path: str, content: bytes) -> None:
        await self.call(self._sandbox.write(path, content))

    async def list(self, path: str = "") -> list[FileInfo]:
        return await self.call(self._sandbox.list(path))

    async def upload(self, tar: bytes, path: str = "") -> None:
        await self.call(self._sandbox.upload(tar, path))

    async def download(self, path: str, most_bytes: int) -> bytes:
        return await self.call(self._sandbox.download(path, most_bytes))

    async def reset(self) -> None:
        await self.call(self._sandbox.reset())

    def renew(self, ttl_s: float) -> float:
        """Extend the lease to this long from now; returns the granted time in seconds. Raises SandboxFailure
        ``lease-over``."""
        return self._manager.renew(self.id, ttl_s)

    async def close(self) -> None:
        """Cancel the running calls, and give the sandbox back."""
        if self._is_over:
            return
        self._is_over = True
        for call in self._calls:
            call.cancel()
        try:
            if self._calls:
                await asyncio.wait(self._calls)
        except asyncio.CancelledError:
            self._is_suspicious = True  # something may still run in it
            raise
        finally:
            self._manager.give_back(self.id, not self._is_suspicious)

    def revoke(self) -> None:
        """End an expired lease."""
        self._is_over = True
        for call in self._calls:
            call.cancel()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call in the sandbox while it is leased."""
        if self._is_over:
            work.close()
            raise lease_over()
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._is_over and (caller is None or not caller.cancelling()):
                raise lease_over() from None
            raise
        except SandboxFailure as failure:
            self._is_suspicious |= failure.kind not in HARMLESS_KINDS
            raise
        finally:
            self._calls.discard(task)

    async def call_for_result(self, work: Coroutine[Any, Any, ExecResult]) -> ExecResult:
        """Run a call whose result may report the sandbox as lost."""
        result = await self.call(work)
        self._is_suspicious |= result.lost is not None
        return result


class LeasedSession:
    """A ``Session`` in a leased sandbox."""

    def __init__(self, leased: LeasedSandbox, session: Session) -> None:
        self._leased = leased
        self._session = session

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        return await self._leased.call_for_result(self._session.run(cell, limits))

    async def interrupt(self) -> None:
        await self._leased.call(self._session.interrupt())

    async def close(self) -> None:
        await self._leased.call(self._session.close())


def lease_over() -> SandboxFailure:
    """The failure of a call to a sandbox whose lease is over."""
    return SandboxFailure(
        "The lease of this sandbox is over.",
        hint="Renew a lease that you need for longer.",
        kind="lease-over",
        retryable=True,
    )

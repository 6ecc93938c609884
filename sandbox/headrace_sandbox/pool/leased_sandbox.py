"""A leased sandbox of the pool.

* After the end of the lease no call reaches the sandbox; a call that was running fails with a failure of ours.
* A result that reports the sandbox as lost, or a failure of the runtime, makes the sandbox suspicious.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from headrace.errors import SandboxFailure
from headrace_sandbox.pool.messages import Hand
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import FileInfo, Sandbox, SandboxCommand, Session, SessionKind

T = TypeVar("T")

HARMLESS = frozenset(
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


class Lender(Protocol):
    """Interface of the pool that a leased sandbox returns to."""

    def give_back(self, lease: str, reusable: bool) -> None: ...

    def renew(self, lease: str, ttl_s: float) -> float: ...


class Leased:
    """A ``Sandbox``. ``queue_s`` and ``start_s``: the time until one was free, and the time to make or reset it.
    ``ttl_s``: the time that the lease was granted for."""

    def __init__(self, lender: Lender, hand: Hand, sandbox: Sandbox) -> None:
        self.id = hand.lease
        self.queue_s, self.start_s, self.ttl_s = hand.queue_s, hand.start_s, hand.ttl_s
        self.isolation = sandbox.isolation
        self._lender = lender
        self._sandbox = sandbox
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._is_suspicious = False

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return self._seen(await self.call(self._sandbox.run(command, limits)))

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
        """Extend the lease to this long from now; returns the time that was granted, in seconds. Raises SandboxFailure
        ``no-such-lease``."""
        return self._lender.renew(self.id, ttl_s)

    async def close(self) -> None:
        """Give the sandbox back, after ending what still runs in it."""
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
            self._lender.give_back(self.id, not self._is_suspicious)

    def revoke(self) -> None:
        """End an expired lease."""
        self._is_over = True
        for call in self._calls:
            call.cancel()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call in the sandbox while it is leased."""
        if self._is_over:
            work.close()
            raise over()
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._is_over and (caller is None or not caller.cancelling()):
                raise over() from None
            raise
        except SandboxFailure as failure:
            self._is_suspicious |= failure.kind not in HARMLESS
            raise
        finally:
            self._calls.discard(task)

    def _seen(self, result: ExecResult) -> ExecResult:
        self._is_suspicious |= result.lost is not None
        return result


class LeasedSession:
    """A ``Session`` in a leased sandbox."""

    def __init__(self, leased: Leased, session: Session) -> None:
        self._leased = leased
        self._session = session

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        return self._leased._seen(await self._leased.call(self._session.run(cell, limits)))

    async def interrupt(self) -> None:
        await self._leased.call(self._session.interrupt())

    async def close(self) -> None:
        await self._leased.call(self._session.close())


def over() -> SandboxFailure:
    """The failure of a call in a sandbox whose lease is over."""
    return SandboxFailure(
        "The lease of this sandbox is over.",
        hint="Renew a lease that you need for longer.",
        kind="lease-over",
        retryable=True,
    )

"""Shell of the pool: carries out the core's instructions with a runtime, in one event loop.

* Executions and leases wait under the same fair rule; the waiting time and the program's time are reported separately.
* A request that is cancelled while it waits, or just as it is served, keeps nothing.
* A sandbox in which something suspicious happened is not reset but closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.pool import instructions
from headrace_sandbox.pool.core import Core
from headrace_sandbox.pool.instructions import Instruction, LeaseSandbox, Make, Refuse, Start
from headrace_sandbox.pool.leased_sandbox import LeasedSandbox, lease_over
from headrace_sandbox.pool.messages import Counts, MakeFailure, PoolSettings, Request, SandboxKind, WarmBounds
from headrace_sandbox.result import LONGEST_S, ExecResult, Limits, check_range
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template, check_ttl

log = logging.getLogger("headrace.sandbox")

EXPECTED_ERRORS = (SandboxFailure, TimeoutError)

WAIT_S = 30.0
"""Default time that a request waits for its turn."""

MAKE_S, RESET_S, CLOSE_S = 60.0, 20.0, 20.0
"""Time limits to make, reset and close a sandbox; beyond them it counts as hung."""

MEMORY_SHARE = 0.75
"""Share of this machine's memory for sandboxes."""


def usual_settings() -> PoolSettings:
    """Default settings for this machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return PoolSettings(running=2 * (os.cpu_count() or 1), memory_bytes=int(memory_bytes * MEMORY_SHARE))


class Pool:
    """A runtime that many owners share. ``warm``: templates whose sandboxes are kept ready. Used in one event loop."""

    def __init__(
        self,
        runtime: Runtime,
        settings: PoolSettings | None = None,
        warm: Sequence[tuple[Template, WarmBounds]] = (),
    ) -> None:
        self.runtime = runtime
        self.settings = settings or usual_settings()
        self._core = Core(self.settings, _new_id, [(kind_of(template), bounds) for template, bounds in warm])
        self._pending: dict[str, asyncio.Future[Start | LeaseSandbox]] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._leased: dict[str, LeasedSandbox] = {}
        self._executions: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start making the warm sandboxes."""
        self._apply(self._core.tick(time.monotonic()))

    async def run(
        self, command: SandboxCommand, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S
    ) -> ExecResult:
        """Run a command in a fresh sandbox once it is its turn. Raises the runtime's SandboxFailure, or ``busy``,
        ``no-sandbox-in-time``, ``too-large``, ``draining``."""
        return await self._execute(lambda: self.runtime.run(command, limits), limits, owner, wait_s)

    async def run_code(
        self, program: PythonProgram, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S
    ) -> ExecResult:
        """Run a Python program in a fresh sandbox once it is its turn. Raises as ``run``."""
        return await self._execute(lambda: self.runtime.run_code(program, limits), limits, owner, wait_s)

    async def lease(
        self, template: Template, ttl_s: float, *, owner: str = "", wait_s: float = WAIT_S
    ) -> LeasedSandbox:
        """Lease a sandbox for a time, which can be extended; closing the sandbox gives it back. Raises as ``run``, and
        ``ttl-too-long``."""
        check_ttl(ttl_s)
        kind = kind_of(template)
        request = Request(
            id=_new_id(), owner=owner, wait_s=wait_s, memory_bytes=kind.memory_bytes, kind=kind, ttl_s=ttl_s
        )
        instruction = await self._ask(request)
        assert isinstance(instruction, LeaseSandbox)
        return self._leased[instruction.lease]

    def leased(self, lease: str) -> LeasedSandbox:
        """The sandbox of a lease. Raises SandboxFailure ``lease-over``."""
        sandbox = self._leased.get(lease)
        if sandbox is None:
            raise lease_over()
        return sandbox

    def is_leased(self, lease: str) -> bool:
        """True if this lease exists."""
        return lease in self._leased

    def counts(self) -> Counts:
        """Current counts of requests and sandboxes."""
        return self._core.counts()

    def drain(self) -> None:
        """Refuse new and waiting requests."""
        self._apply(self._core.drain(time.monotonic()))

    async def close(self) -> None:
        """End everything and close the runtime, after waiting for all executions, including cancelled ones."""
        self.drain()
        for leased in list(self._leased.values()):
            await leased.close()
        while under_way := {*self._tasks, *self._executions}:
            await asyncio.wait(under_way)
        if self._timer is not None:
            self._timer.cancel()
        await self.runtime.close()

    async def _execute(
        self, work: Callable[[], Awaitable[ExecResult]], limits: Limits, owner: str, wait_s: float
    ) -> ExecResult:
        request = Request(id=_new_id(), owner=owner, wait_s=wait_s, memory_bytes=limits.memory_bytes)
        started = await self._ask(request)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._executions.add(ended)
        try:
            result = await work()
        finally:
            self._executions.discard(ended)
            ended.set_result(None)
            self._apply(self._core.done(request.id, time.monotonic()))
        return msgspec.structs.replace(result, queue_s=started.queue_s)

    async def _ask(self, request: Request) -> Start | LeaseSandbox:
        check_range("wait_s", request.wait_s, 0, LONGEST_S)
        pending: asyncio.Future[Start | LeaseSandbox] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = pending
        self._apply(self._core.ask(request, time.monotonic()))
        try:
            return await pending
        except asyncio.CancelledError:
            if pending.cancelled() or not pending.done():
                self._pending.pop(request.id, None)
                self._apply(self._core.withdraw(request.id, time.monotonic()))
            elif pending.exception() is None:
                self._return_unused(pending.result())
            raise

    def _return_unused(self, instruction: Start | LeaseSandbox) -> None:
        """Give back a sandbox whose requester was cancelled."""
        if isinstance(instruction, Start):
            self._apply(self._core.done(instruction.request, time.monotonic()))
        else:
            self._leased.pop(instruction.lease, None)
            self._apply(self._core.give_back(instruction.lease, True, time.monotonic()))

    def give_back(self, lease: str, reusable: bool) -> None:
        """End a lease; called by ``LeasedSandbox.close``."""
        if self._leased.pop(lease, None) is not None:
            self._apply(self._core.give_back(lease, reusable, time.monotonic()))

    def renew(self, lease: str, ttl_s: float) -> float:
        """Extend a lease to this long from now; returns the time that was granted, in seconds. Raises SandboxFailure
        ``lease-over``."""
        check_range("ttl_s", ttl_s, 0, LONGEST_S)
        granted_s = self._core.renew(lease, ttl_s, time.monotonic())
        if granted_s is None:
            raise lease_over()
        self._set_timer()
        return granted_s

    # Execution of instructions ----------------------------------------------------------------------------------

    def _apply(self, out: list[Instruction]) -> None:
        for instruction in out:
            match instruction:
                case Start():
                    self._resolve(instruction.request, instruction)
                case LeaseSandbox():
                    sandbox = self._sandboxes[instruction.sandbox]
                    self._leased[instruction.lease] = LeasedSandbox(self, instruction, sandbox)
                    self._resolve(instruction.request, instruction)
                case Refuse():
                    self._fail(instruction)
                case Make():
                    self._start_task(self._make(instruction))
                case instructions.Reset():
                    self._start_task(self._clean(instruction.sandbox))
                case instructions.Close():
                    self._start_task(self._close(instruction.sandbox))
                case instructions.Revoke():
                    self._leased.pop(instruction.lease).revoke()
        self._set_timer()

    def _resolve(self, request: str, instruction: Start | LeaseSandbox) -> None:
        pending = self._pending.pop(request)
        if pending.cancelled():  # in this turn of the event loop; its task has not run yet
            asyncio.get_running_loop().call_soon(self._return_unused, instruction)
        else:
            pending.set_result(instruction)

    def _fail(self, refusal: Refuse) -> None:
        pending = self._pending.pop(refusal.request)
        if pending.cancelled():
            return
        extra = {} if refusal.after_s is None else {"retry_after_s": round(refusal.after_s, 3)}
        failure = SandboxFailure(
            refusal.detail, hint=HINTS.get(refusal.kind, ""), kind=refusal.kind, retryable=refusal.retryable, **extra
        )
        pending.set_exception(failure)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.result()

    async def _make(self, instruction: Make) -> None:
        id_ = instruction.sandbox
        try:
            async with timeout(MAKE_S):
                sandbox = await self.runtime.open(instruction.kind.template, instruction.ttl_s)
        except Exception as error:  # noqa: BLE001 - a runtime may raise anything; its sandbox does not exist
            failure = _log_failure("made", error)
            self._apply(self._core.not_made(id_, failure, time.monotonic()))
            return
        self._sandboxes[id_] = sandbox
        self._apply(self._core.made(id_, time.monotonic()))

    async def _clean(self, id_: str) -> None:
        try:
            async with timeout(RESET_S):
                await self._sandboxes[id_].reset()
        except Exception as error:  # noqa: BLE001 - a runtime may raise anything; the sandbox is not as new
            _log_failure("reset", error)
            self._apply(self._core.not_cleaned(id_, time.monotonic()))
        else:
            self._apply(self._core.cleaned(id_, time.monotonic()))

    async def _close(self, id_: str) -> None:
        sandbox = self._sandboxes.pop(id_)
        try:
            async with timeout(CLOSE_S):
                await sandbox.close()
        except Exception as error:  # noqa: BLE001 - a runtime may raise anything; something may be left
            _log_failure("closed", error)
            self._apply(self._core.not_closed(id_, time.monotonic()))
        else:
            self._apply(self._core.closed(id_, time.monotonic()))

    def _set_timer(self) -> None:
        due = self._core.next_due()
        if due is None or (self._timer is not None and not self._timer.cancelled() and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._core.tick(time.monotonic()))


HINTS = {
    "busy": "Try again later, with fewer requests at a time.",
    "no-sandbox-in-time": "Let requests wait longer, or give the pool more capacity.",
    "too-large": "Lower its memory limit, or give the pool more memory.",
    "ttl-too-long": "Request a shorter lease, and renew it.",
    "draining": "Try again when the service is back.",
}
"""Hints for each kind of refusal."""


def kind_of(template: Template) -> SandboxKind:
    """The kind of a template's sandboxes: equal templates share one kind."""
    name = hashlib.sha256(msgspec.msgpack.encode(template, order="deterministic")).hexdigest()[:32]
    return SandboxKind(name, template.limits.memory_bytes, template)


def _log_failure(action: str, error: Exception) -> MakeFailure:
    """Log a failure; returns the runtime's message, or that the operation took too long."""
    detail = "it took too long" if isinstance(error, TimeoutError) else str(error)
    log.warning("A sandbox could not be %s: %s", action, detail, exc_info=not isinstance(error, EXPECTED_ERRORS))
    if isinstance(error, SandboxFailure):
        return MakeFailure(error.kind, error.detail, error.retryable)
    return MakeFailure("sandbox-not-made", detail, True)


def _new_id() -> str:
    return secrets.token_hex(16)

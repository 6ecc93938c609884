"""Shell of the pool: carries out the core's instructions with a runtime, in one event loop.

* Executions and leases wait in the same fair way; the time of the wait is reported apart from the time of the
  program.
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
from headrace_sandbox.pool.core import Core
from headrace_sandbox.pool.leased_sandbox import Leased, over
from headrace_sandbox.pool.messages import (
    Clean,
    Close,
    Counts,
    Hand,
    Instruction,
    Make,
    NotMade,
    PoolSettings,
    Refuse,
    Request,
    Revoke,
    SandboxKind,
    Start,
    WarmBounds,
)
from headrace_sandbox.result import LONGEST_S, ExecResult, Limits, check_range
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template, check_ttl

log = logging.getLogger("headrace.sandbox")

EXPECTED = (SandboxFailure, TimeoutError)

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
    """A runtime that many owners share. ``warm``: templates of which sandboxes are kept ready. ``observe`` receives
    each instruction. Used in one event loop."""

    def __init__(
        self,
        runtime: Runtime,
        settings: PoolSettings | None = None,
        warm: Sequence[tuple[Template, WarmBounds]] = (),
        *,
        observe: Callable[[Instruction], None] = lambda instruction: None,
    ) -> None:
        self.runtime = runtime
        self.settings = settings or usual_settings()
        self._core = Core(self.settings, _new_id, [(kind_of(template), bounds) for template, bounds in warm])
        self._observe = observe
        self._answers: dict[str, asyncio.Future[Start | Hand]] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._leased: dict[str, Leased] = {}
        self._executions: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start making the warm sandboxes."""
        self._apply(self._core.tick(time.monotonic()))

    async def run(
        self, command: SandboxCommand, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S
    ) -> ExecResult:
        """Run a command in a fresh sandbox, in its turn. Raises SandboxFailure: the runtime's, or ``busy``,
        ``no-sandbox-in-time``, ``too-large``, ``draining``."""
        return await self._execute(lambda: self.runtime.run(command, limits), limits, owner, wait_s)

    async def run_code(
        self, program: PythonProgram, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S
    ) -> ExecResult:
        """Run a Python program in a fresh sandbox, in its turn. Raises as ``run``."""
        return await self._execute(lambda: self.runtime.run_code(program, limits), limits, owner, wait_s)

    async def lease(self, template: Template, ttl_s: float, *, owner: str = "", wait_s: float = WAIT_S) -> Leased:
        """Lease a sandbox for a time, which can be renewed; closing the sandbox gives it back. Raises as ``run``, and
        ``ttl-too-long``."""
        check_ttl(ttl_s)
        kind = kind_of(template)
        request = Request(
            id=_new_id(), owner=owner, wait_s=wait_s, memory_bytes=kind.memory_bytes, kind=kind, ttl_s=ttl_s
        )
        hand = await self._ask(request)
        assert isinstance(hand, Hand)
        return self._leased[hand.lease]

    def leased(self, lease: str) -> Leased:
        """The sandbox of a lease. Raises SandboxFailure ``lease-over``."""
        found = self._leased.get(lease)
        if found is None:
            raise over()
        return found

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

    async def _ask(self, request: Request) -> Start | Hand:
        check_range("wait_s", request.wait_s, 0, LONGEST_S)
        answer: asyncio.Future[Start | Hand] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        self._apply(self._core.ask(request, time.monotonic()))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled() or not answer.done():
                self._answers.pop(request.id, None)
                self._apply(self._core.withdraw(request.id, time.monotonic()))
            elif answer.exception() is None:
                self._return(answer.result())
            raise

    def _return(self, given: Start | Hand) -> None:
        """Give back a sandbox whose requester has gone."""
        if isinstance(given, Start):
            self._apply(self._core.done(given.request, time.monotonic()))
        else:
            self._leased.pop(given.lease, None)
            self._apply(self._core.give_back(given.lease, True, time.monotonic()))

    def give_back(self, lease: str, reusable: bool) -> None:
        """End a lease; called by ``Leased.close``."""
        if self._leased.pop(lease, None) is not None:
            self._apply(self._core.give_back(lease, reusable, time.monotonic()))

    def renew(self, lease: str, ttl_s: float) -> float:
        """Extend a lease to this long from now; returns the time that was granted, in seconds. Raises SandboxFailure
        ``lease-over``."""
        check_range("ttl_s", ttl_s, 0, LONGEST_S)
        granted_s = self._core.renew(lease, ttl_s, time.monotonic())
        if granted_s is None:
            raise over()
        self._set_timer()
        return granted_s

    # Execution of instructions ----------------------------------------------------------------------------------

    def _apply(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._observe(instruction)
            match instruction:
                case Start():
                    self._answer(instruction.request, instruction)
                case Hand():
                    sandbox = self._sandboxes[instruction.sandbox]
                    self._leased[instruction.lease] = Leased(self, instruction, sandbox)
                    self._answer(instruction.request, instruction)
                case Refuse():
                    self._fail(instruction)
                case Make():
                    self._do(self._make(instruction))
                case Clean():
                    self._do(self._clean(instruction.sandbox))
                case Close():
                    self._do(self._close(instruction.sandbox))
                case Revoke():
                    self._leased.pop(instruction.lease).revoke()
        self._set_timer()

    def _answer(self, request: str, given: Start | Hand) -> None:
        answer = self._answers.pop(request)
        if answer.cancelled():  # in this turn of the event loop; its task has not run yet
            asyncio.get_running_loop().call_soon(self._return, given)
        else:
            answer.set_result(given)

    def _fail(self, refusal: Refuse) -> None:
        answer = self._answers.pop(refusal.request)
        if answer.cancelled():
            return
        extra = {} if refusal.after_s is None else {"retry_after_s": round(refusal.after_s, 3)}
        failure = SandboxFailure(
            refusal.detail, hint=HINTS.get(refusal.kind, ""), kind=refusal.kind, retryable=refusal.retryable, **extra
        )
        answer.set_exception(failure)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._did)

    def _did(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.result()

    async def _make(self, instruction: Make) -> None:
        id_ = instruction.sandbox
        try:
            async with timeout(MAKE_S):
                sandbox = await self.runtime.open(instruction.kind.template, instruction.ttl_s)
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises, its sandbox is not there
            failure = _failed("made", error)
            self._apply(self._core.not_made(id_, failure, time.monotonic()))
            return
        self._sandboxes[id_] = sandbox
        self._apply(self._core.made(id_, time.monotonic()))

    async def _clean(self, id_: str) -> None:
        try:
            async with timeout(RESET_S):
                await self._sandboxes[id_].reset()
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the sandbox is not as new
            _failed("reset", error)
            self._apply(self._core.not_cleaned(id_, time.monotonic()))
        else:
            self._apply(self._core.cleaned(id_, time.monotonic()))

    async def _close(self, id_: str) -> None:
        sandbox = self._sandboxes.pop(id_)
        try:
            async with timeout(CLOSE_S):
                await sandbox.close()
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises, something may be left
            _failed("closed", error)
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
    "busy": "Ask again later, with fewer requests at a time.",
    "no-sandbox-in-time": "Let requests wait longer, or give the pool more capacity.",
    "too-large": "Lower its memory limit, or give the pool more memory.",
    "ttl-too-long": "Ask for a shorter lease, and renew it.",
    "draining": "Ask again when the service is back.",
}
"""Hints for each kind of refusal."""


def kind_of(template: Template) -> SandboxKind:
    """The kind of a template's sandboxes: equal templates share one kind."""
    name = hashlib.sha256(msgspec.msgpack.encode(template, order="deterministic")).hexdigest()[:32]
    return SandboxKind(name, template.limits.memory_bytes, template)


def _failed(what: str, error: Exception) -> NotMade:
    """Log a failure; returns the runtime's message, or that the operation took too long."""
    detail = "it took too long" if isinstance(error, TimeoutError) else str(error)
    log.warning("A sandbox could not be %s: %s", what, detail, exc_info=not isinstance(error, EXPECTED))
    if isinstance(error, SandboxFailure):
        return NotMade(error.kind, error.detail, error.retryable)
    return NotMade("sandbox-not-made", detail, True)


def _new_id() -> str:
    return secrets.token_hex(16)

"""The pool at work: does what its core decides, with a runtime, in one event loop.

* One execution, and one sandbox that lives on, are asked for in the same fair way; how long that took is told apart
  from what the program took.
* Whoever is cancelled while it waits, or just when it was served, keeps nothing.
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
from headrace_sandbox.runtimes.base import Command, PythonProgram, Runtime, Sandbox, Template, check_ttl

log = logging.getLogger("headrace.sandbox")

EXPECTED = (SandboxFailure, TimeoutError)

WAIT_S = 30.0
"""How long a request waits for its turn, unless it says so itself."""

MAKE_S, RESET_S, CLOSE_S = 60.0, 20.0, 20.0
"""For a sandbox to be made, reset and closed; what takes longer hangs."""

MEMORY_SHARE = 0.75
"""Of this machine's memory, for sandboxes."""


def usual_settings() -> PoolSettings:
    """What suits this machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return PoolSettings(running=2 * (os.cpu_count() or 1), memory_bytes=int(memory_bytes * MEMORY_SHARE))


class Pool:
    """Shares what a runtime can do. ``warm``: templates of which sandboxes are kept ready. Used in one event loop;
    ``observe`` is told each instruction."""

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
        """Begin to make what is kept warm."""
        self._apply(self._core.tick(time.monotonic()))

    async def run(self, command: Command, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S) -> ExecResult:
        """Run a command in a fresh sandbox, in its turn. Raises SandboxFailure: the runtime's, or ``busy``,
        ``no-sandbox-in-time``, ``too-large``, ``draining``."""
        return await self._execute(lambda: self.runtime.run(command, limits), limits, owner, wait_s)

    async def run_code(
        self, program: PythonProgram, limits: Limits, *, owner: str = "", wait_s: float = WAIT_S
    ) -> ExecResult:
        """Run a Python program in a fresh sandbox, in its turn. Raises as ``run``."""
        return await self._execute(lambda: self.runtime.run_code(program, limits), limits, owner, wait_s)

    async def lease(self, template: Template, ttl_s: float, *, owner: str = "", wait_s: float = WAIT_S) -> Leased:
        """A sandbox for so long, unless the lease is renewed; closing it gives it back. Raises as ``run``, and
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
        """Whether there is such a lease."""
        return lease in self._leased

    def counts(self) -> Counts:
        """How things stand."""
        return self._core.counts()

    def drain(self) -> None:
        """Take nothing new, and refuse what waits."""
        self._apply(self._core.drain(time.monotonic()))

    async def close(self) -> None:
        """End everything, and the runtime; executions are waited for, those that were cancelled too."""
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
        """It was given to somebody who is not there any more."""
        if isinstance(given, Start):
            self._apply(self._core.done(given.request, time.monotonic()))
        else:
            self._leased.pop(given.lease, None)
            self._apply(self._core.give_back(given.lease, True, time.monotonic()))

    def give_back(self, lease: str, reusable: bool) -> None:
        """A lease is over; ``Leased.close`` calls this."""
        if self._leased.pop(lease, None) is not None:
            self._apply(self._core.give_back(lease, reusable, time.monotonic()))

    def renew(self, lease: str, ttl_s: float) -> float:
        """The lease lasts so long from now on; gives how long it really does, in seconds. Raises SandboxFailure
        ``lease-over``."""
        check_range("ttl_s", ttl_s, 0, LONGEST_S)
        granted_s = self._core.renew(lease, ttl_s, time.monotonic())
        if granted_s is None:
            raise over()
        self._set_timer()
        return granted_s

    # Carrying out -----------------------------------------------------------------------------------------------

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
        if answer.cancelled():  # in this very turn of the event loop; its task has not run yet
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
    "no-sandbox-in-time": "Let it wait longer, or give the pool more room.",
    "too-large": "Give it a smaller limit of memory, or the pool more.",
    "ttl-too-long": "Ask for a shorter lease, and renew it.",
    "draining": "Ask again when the service is back.",
}
"""What to do about a refusal."""


def kind_of(template: Template) -> SandboxKind:
    """Sandboxes of equal templates are of one kind."""
    name = hashlib.sha256(msgspec.msgpack.encode(template, order="deterministic")).hexdigest()[:32]
    return SandboxKind(name, template.limits.memory_bytes, template)


def _failed(what: str, error: Exception) -> NotMade:
    """Say so in the log; what the runtime says of it, or that it took too long."""
    detail = "it took too long" if isinstance(error, TimeoutError) else str(error)
    log.warning("A sandbox could not be %s: %s", what, detail, exc_info=not isinstance(error, EXPECTED))
    if isinstance(error, SandboxFailure):
        return NotMade(error.kind, error.detail, error.retryable)
    return NotMade("sandbox-not-made", detail, True)


def _new_id() -> str:
    return secrets.token_hex(16)

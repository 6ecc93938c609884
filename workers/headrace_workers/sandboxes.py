"""The sandbox of a worker, and of each of its episodes.

* A worker has one runtime; it is made and tested at the first need, on the worker's event loop.
* A fault of a sandbox is tried again in a fresh one where it may be, and then ends the attempt; never an observation.
* The runtime may be a service of the host; then runs share it fairly, and one that is busy is asked again when it said.
* Waiting for a sandbox, and making one, is no working time of the episode, and the deadline of a step stands still
  meanwhile; each call of a sandbox has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.client import ServiceRuntime, client_of
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Runtime, Sandbox, Template
from headrace_sandbox.runtimes.registry import ready_runtime

T = TypeVar("T")

TRIES = 3
"""Of one program: a sandbox that is lost now and then should cost no episode."""

PAUSE_S = 0.2
"""Before the second try; twice that before the third."""

PATIENCE_S = 180.0
"""For a program beside its own time: to wait for a sandbox, to make one, to kill it. Runtimes have shorter deadlines of
their own; this one is for a runtime that hangs."""

QUEUE_S = 120.0
"""How long a program may wait for its turn in a service: shorter than the patience, so that the service is heard."""

BUSY = "busy"
"""The kind of failure of a service that has too many waiting; it says when to ask again, and that is no try."""

ASK_AGAIN_S = 10.0
"""How long a runtime that could not be made is refused without a new try."""


async def open_runtime(name: str) -> Runtime:
    """A runtime that passed its self-test, by its name; or the service at an address, such as unix:///path, with the
    token of the variable HEADRACE_SANDBOX_TOKEN. Raises SandboxFailure."""
    if "://" not in name:
        if sys.platform == "linux":
            await asyncio.to_thread(reap)  # what workers left that were killed
        return await ready_runtime(name)
    client = client_of(name, token=os.environ.get("HEADRACE_SANDBOX_TOKEN", "").strip(), wait_s=QUEUE_S)
    try:
        await client.connect()
    except SandboxFailure:
        await client.close()
        raise
    return client


class WorkerSandbox:
    """The sandbox of a worker process. ``name``: of the runtime, or the address of a service; empty: the worker has
    none."""

    def __init__(self, name: str, open_: Callable[[str], Awaitable[Runtime]] | None = None) -> None:
        self.name = name
        self._open = open_ or open_runtime
        self._runtime: Runtime | None = None
        self._opening = asyncio.Lock()
        self._refused: SandboxFailure | None = None
        self._refused_until = 0.0

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the worker offers by having it."""
        if not self.name:
            return ()
        return ("sandbox",) if "://" in self.name else ("sandbox", f"sandbox:{self.name}")

    async def runtime(self, owner: str = "") -> Runtime:
        """The runtime, for programs of that owner. Raises SandboxFailure ``no-sandbox``, or why it cannot be had."""
        if self._runtime is None:
            async with self._opening:
                if self._runtime is None:
                    self._runtime = await self._opened()
        return self._runtime.for_owner(owner) if isinstance(self._runtime, ServiceRuntime) else self._runtime

    async def _opened(self) -> Runtime:
        if not self.name:
            raise SandboxFailure(
                "The environment runs programs, and this worker was started without a sandbox.",
                hint="Start workers with --sandbox, such as --sandbox bubblewrap; name the capability `sandbox` in the "
                "run spec, so that only those get its episodes.",
                kind="no-sandbox",
                retryable=False,
            )
        if self._refused is not None and time.monotonic() < self._refused_until:
            raise self._refused.with_traceback(None)
        try:
            return await self._open(self.name)
        except SandboxFailure as failure:
            self._refused, self._refused_until = failure, time.monotonic() + ASK_AGAIN_S
            raise

    async def close(self) -> None:
        """End all that it runs."""
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None


class EpisodeSandbox:
    """A worker's sandbox in the hands of one episode. ``domain``: of trust, which is its run. ``clock`` is monotonic,
    in seconds."""

    def __init__(self, worker: WorkerSandbox, *, domain: str, clock: Callable[[], float]) -> None:
        self._worker = worker
        self._domain = domain
        self._clock = clock
        self._calls = 0
        self._begun_at = 0.0
        self._ran: list[tuple[float, float]] = []
        self._left_s: float | None = None
        self.deadline: asyncio.Timeout | None = None
        """Of the step that runs now."""
        self.waited_s = 0.0
        """Time so far in which calls were open and no program ran."""

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a fresh sandbox. Raises SandboxFailure."""
        return await self._run(limits, lambda runtime: runtime.run(command, limits))

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a fresh sandbox. Raises SandboxFailure."""
        program = msgspec.structs.replace(program, domain=program.domain or self._domain)
        return await self._run(limits, lambda runtime: runtime.run_code(program, limits))

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A sandbox that lives on; whoever opens it closes it. What runs in it is not tried again: it is not as it was.
        Raises SandboxFailure."""
        with self._counted():
            return await self._tried(template.limits, lambda runtime: runtime.open(template, ttl_s))

    async def _run(self, limits: Limits, call: Callable[[Runtime], Awaitable[ExecResult]]) -> ExecResult:
        with self._counted():
            result = await self._tried(limits, call)
            ended_at = self._clock()
            self._ran.append((ended_at - result.wall_s, ended_at))
            return result

    async def _tried(self, limits: Limits, call: Callable[[Runtime], Awaitable[T]]) -> T:
        patient_until = self._clock() + PATIENCE_S
        number = 1
        while True:
            try:
                return await self._try(limits, call)
            except SandboxFailure as failure:
                if failure.kind == BUSY and self._clock() < patient_until:
                    await asyncio.sleep(failure.extra.get("retry_after_s", PAUSE_S))
                    continue
                if number == TRIES or not failure.retryable:
                    raise
            await asyncio.sleep(PAUSE_S * number)
            number += 1

    async def _try(self, limits: Limits, call: Callable[[Runtime], Awaitable[T]]) -> T:
        most_s = limits.wall_s + PATIENCE_S
        try:
            async with timeout(most_s):
                return await call(await self._worker.runtime(self._domain))
        except TimeoutError:
            raise SandboxFailure(
                f"The sandbox gave no result within {most_s:g} s for a program that may run {limits.wall_s:g} s.",
                kind="sandbox-hangs",
                retryable=True,
            ) from None

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """While calls are open, what passes is waiting, but for the time in which programs run."""
        if self._calls == 0:
            self._begun_at, self._ran, self._left_s = self._clock(), [], _stopped(self.deadline)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                passed_s = self._clock() - self._begun_at
                worked_s = min(passed_s, union_s(self._ran))
                self.waited_s += passed_s - worked_s
                if self.deadline is not None and self._left_s is not None:
                    left_s = max(0.0, self._left_s - worked_s)
                    self.deadline.reschedule(asyncio.get_running_loop().time() + left_s)


def _stopped(deadline: asyncio.Timeout | None) -> float | None:
    """Let a deadline stand still; gives the seconds that are left until it."""
    when = None if deadline is None else deadline.when()
    if deadline is None or when is None:
        return None
    deadline.reschedule(None)
    return when - asyncio.get_running_loop().time()


def union_s(intervals: list[tuple[float, float]]) -> float:
    """How long at least one of these intervals of time lasted."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

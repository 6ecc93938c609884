"""The sandbox of a worker, and of each of its episodes.

* A worker has one runtime; it is made and tested at its first use, on the worker's event loop.
* A sandbox failure is retried in a fresh sandbox if it is retryable, and then ends the attempt; it never becomes an
  observation.
* The runtime may be a service of the host. Then runs share it fairly, and a busy service is asked again at the time
  that it names.
* Waiting for a sandbox, and making one, does not count as working time of the episode, and stops the deadline of a
  step; each call of a sandbox has its own deadline.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.client import ServiceRuntime, client_of
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.registry import ready_runtime
from headrace_workers.step_clock import StepClock

T = TypeVar("T")

TRIES = 3
"""Tries of one program: a sandbox that is lost occasionally should not fail an episode."""

PAUSE_S = 0.2
"""Pause before the second try; twice that before the third."""

OVERHEAD_S = 180.0
"""Time for a program beyond its own longest time: to wait for a sandbox, make one and kill it. Runtimes have shorter
deadlines of their own; this one is for a runtime that hangs."""

QUEUE_S = 120.0
"""Longest wait in the queue of a service; below ``OVERHEAD_S``, so that the service's own answer arrives."""

BUSY = "busy"
"""Failure kind of a service whose queue is full; it says when to ask again, which does not count as a try."""

REFUSAL_S = 10.0
"""Time after a failure to make the runtime during which the failure is repeated without a new try."""


async def open_runtime(name: str) -> Runtime:
    """Open a runtime by name, after its self-test; or the service at an address, such as unix:///path, with the token
    of the variable HEADRACE_SANDBOX_TOKEN. Raises SandboxFailure."""
    if "://" not in name:
        if sys.platform == "linux":
            await asyncio.to_thread(reap)  # remove the leftovers of killed workers
        return await ready_runtime(name)
    client = client_of(name, token=os.environ.get("HEADRACE_SANDBOX_TOKEN", "").strip(), wait_s=QUEUE_S)
    try:
        await client.connect()
    except SandboxFailure:
        await client.close()
        raise
    return client


class WorkerSandbox:
    """The sandbox of a worker process. ``name``: the runtime's name or a service's address; empty for a worker without
    a sandbox."""

    def __init__(self, name: str, open_: Callable[[str], Awaitable[Runtime]] | None = None) -> None:
        self.name = name
        self._open = open_ or open_runtime
        self._runtime: Runtime | None = None
        self._opening = asyncio.Lock()
        self._failure: SandboxFailure | None = None
        self._failure_until = 0.0

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities that the worker has because of its sandbox."""
        if not self.name:
            return ()
        return ("sandbox",) if "://" in self.name else ("sandbox", f"sandbox:{self.name}")

    async def runtime(self, owner: str = "") -> Runtime:
        """The runtime for programs of an owner. Raises SandboxFailure, such as ``no-sandbox``."""
        if self._runtime is None:
            async with self._opening:
                if self._runtime is None:
                    self._runtime = await self._open_runtime()
        return self._runtime.for_owner(owner) if isinstance(self._runtime, ServiceRuntime) else self._runtime

    async def _open_runtime(self) -> Runtime:
        if not self.name:
            raise SandboxFailure(
                "The environment runs programs, and this worker was started without a sandbox.",
                hint="Start workers with --sandbox, such as --sandbox bubblewrap; name the capability `sandbox` in the "
                "run spec, so that only those get its episodes.",
                kind="no-sandbox",
                retryable=False,
            )
        if self._failure is not None and time.monotonic() < self._failure_until:
            raise self._failure.with_traceback(None)
        try:
            return await self._open(self.name)
        except SandboxFailure as failure:
            self._failure, self._failure_until = failure, time.monotonic() + REFUSAL_S
            raise

    async def close(self) -> None:
        """Close the runtime and all its sandboxes."""
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None


class EpisodeSandbox:
    """The worker's sandbox as used by one episode. ``domain``: the trust domain, which is its run. ``clock`` is
    monotonic, in seconds."""

    def __init__(
        self, worker: WorkerSandbox, *, domain: str, clock: Callable[[], float], steps: StepClock | None = None
    ) -> None:
        self._worker = worker
        self._domain = domain
        self._clock = clock
        self.steps = steps or StepClock(clock)
        """The clock of the episode's steps."""

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a fresh sandbox. Raises SandboxFailure."""
        return await self._run(limits, lambda runtime: runtime.run(command, limits))

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a fresh sandbox. Raises SandboxFailure."""
        program = msgspec.structs.replace(program, domain=program.domain or self._domain)
        return await self._run(limits, lambda runtime: runtime.run_code(program, limits))

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Open a persistent sandbox; the caller closes it. Programs in it are not retried, because its state changed.
        Raises SandboxFailure."""
        with self.steps.outside_call():
            return await self._with_retries(template.limits.wall_s, lambda runtime: runtime.open(template, ttl_s))

    async def _run(self, limits: Limits, call: Callable[[Runtime], Awaitable[ExecResult]]) -> ExecResult:
        with self.steps.outside_call():
            result = await self._with_retries(limits.whole_s, call)
            self.steps.add_work(result.wall_s if result.work_s is None else result.work_s)
            return result

    async def _with_retries(self, program_s: float, call: Callable[[Runtime], Awaitable[T]]) -> T:
        give_up_at = self._clock() + OVERHEAD_S
        number = 1
        while True:
            try:
                return await self._try(program_s, call)
            except SandboxFailure as failure:
                if failure.kind == BUSY and self._clock() < give_up_at:
                    await asyncio.sleep(failure.extra.get("retry_after_s", PAUSE_S))
                    continue
                if number == TRIES or not failure.retryable:
                    raise
            await asyncio.sleep(PAUSE_S * number)
            number += 1

    async def _try(self, program_s: float, call: Callable[[Runtime], Awaitable[T]]) -> T:
        max_s = program_s + OVERHEAD_S
        try:
            async with timeout(max_s):
                return await call(await self._worker.runtime(self._domain))
        except TimeoutError:
            raise SandboxFailure(
                f"The sandbox returned no result within {max_s:g} s for a program that may take {program_s:g} s.",
                kind="sandbox-hangs",
                retryable=True,
            ) from None

"""The context of an environment: a sandbox for programs, threads for blocking calls, processes for unbounded calls.

* An environment with an attribute ``environment_context`` has it set before its first ``reset``.
* Outside a worker (in a notebook, in a check) each program runs in a new runtime that is closed after it: the one
  named by the variable HEADRACE_SANDBOX, or the default.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template, not_offered
from headrace_sandbox.runtimes.registry import DEFAULT, make_runtime
from headrace_workers.bounded_calls import BoundedCalls

T = TypeVar("T")


class ProgramRunner(Protocol):
    """A sandbox as environments use it. A fault of the sandbox raises SandboxFailure."""

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult: ...

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult: ...

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Open a persistent sandbox; the caller closes it."""
        ...


class EnvironmentContext(Protocol):
    """The services that an environment may use."""

    @property
    def sandbox(self) -> ProgramRunner:
        """The sandbox that runs programs."""
        ...

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function outside the event loop."""
        ...

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """Call ``module:name`` in a separate process, which is killed after ``time_s``. Arguments and result must be
        JSON-able. Raises headrace_workers.bounded_calls.LimitExceeded, and EnvironmentFailure."""
        ...


class LocalContext:
    """The context of an environment outside a worker. ``calls`` make its bounded calls; without them each call has a
    process of its own, which no event loop needs to close."""

    def __init__(self, calls: BoundedCalls | None = None) -> None:
        self._calls = calls

    @property
    def sandbox(self) -> ProgramRunner:
        """The sandbox, with a new runtime for each program."""
        return _RuntimePerProgram(os.environ.get("HEADRACE_SANDBOX", DEFAULT))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it on a thread of the event loop."""
        return await asyncio.to_thread(function, *arguments)

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """Call it in a separate process."""
        if self._calls is not None:
            return await self._calls.call(function, *arguments, time_s=time_s, memory_bytes=memory_bytes)
        calls = BoundedCalls()
        try:
            return await calls.call(function, *arguments, time_s=time_s, memory_bytes=memory_bytes)
        finally:
            await calls.close()


class _RuntimePerProgram:
    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        async with self._new_runtime() as runtime:
            return await runtime.run(command, limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        async with self._new_runtime() as runtime:
            return await runtime.run_code(program, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        raise not_offered(self._name, "persistent sandboxes outside a worker")

    @contextlib.asynccontextmanager
    async def _new_runtime(self) -> AsyncIterator[Runtime]:
        runtime = await asyncio.to_thread(make_runtime, self._name)
        try:
            yield runtime
        finally:
            await runtime.close()


LOCAL_CONTEXT = LocalContext()
"""The context of every environment outside a worker."""

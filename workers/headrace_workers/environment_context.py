"""What a worker lends its environments: a sandbox for programs, threads for calls that block, and processes for calls
that may never end.

* An environment that has an attribute ``surroundings`` finds them there before its first ``reset``.
* Away from a worker (in a notebook, in a check) each program runs in a runtime that is made for it and ended after it:
  the one that the variable HEADRACE_SANDBOX names, or the default.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Runtime, Sandbox, Template, not_offered
from headrace_sandbox.runtimes.registry import DEFAULT, make_runtime
from headrace_workers.bounded_calls import BoundedCalls

T = TypeVar("T")


class RunsPrograms(Protocol):
    """A sandbox as environments use it. What was a fault of ours raises SandboxFailure."""

    async def run(self, command: Command, limits: Limits) -> ExecResult: ...

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult: ...

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A sandbox that lives on; whoever opens it closes it."""
        ...


class Surroundings(Protocol):
    """What an environment finds."""

    @property
    def sandbox(self) -> RunsPrograms:
        """Runs programs."""
        ...

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that blocks, away from the event loop."""
        ...

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """Call ``module:name`` in a process of its own, which is killed at the end of its time. Arguments and result
        are what JSON can hold. Raises headrace_workers.bounded_calls.Exhausted, and EnvironmentFailure."""
        ...


class Alone:
    """The surroundings of an environment that no worker runs."""

    @property
    def sandbox(self) -> RunsPrograms:
        """Makes a runtime for each program."""
        return _MadeForEach(os.environ.get("HEADRACE_SANDBOX", DEFAULT))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """On a thread of the event loop."""
        return await asyncio.to_thread(function, *arguments)

    async def bounded(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """In a process that is started for it."""
        calls = BoundedCalls()
        try:
            return await calls.call(function, *arguments, time_s=time_s, memory_bytes=memory_bytes)
        finally:
            await calls.close()


class _MadeForEach:
    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        async with self._made() as runtime:
            return await runtime.run(command, limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        async with self._made() as runtime:
            return await runtime.run_code(program, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        raise not_offered(self._name, "sandboxes that live on outside a worker")

    @contextlib.asynccontextmanager
    async def _made(self) -> AsyncIterator[Runtime]:
        runtime = await asyncio.to_thread(make_runtime, self._name)
        try:
            yield runtime
        finally:
            await runtime.close()


ALONE = Alone()
"""For every environment that no worker runs."""

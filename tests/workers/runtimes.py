"""Runtimes of sandboxes for tests of what uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.registry import make_runtime
from headrace_workers.sandboxes import WorkerSandbox

ISOLATION = Isolation(runtime="scripted", versions={}, active=[])

LOST = SandboxFailure("The sandbox is gone.", kind="sandbox-lost", retryable=True)


def result(stdout: str = "", stderr: str = "", **changes: Any) -> ExecResult:
    """The result of a program that ended with 0, unless something else is said."""
    values: dict[str, Any] = {
        "exit_code": 0,
        "signal": None,
        "stdout": Output(head=stdout.encode(), total_bytes=len(stdout.encode())),
        "stderr": Output(head=stderr.encode(), total_bytes=len(stderr.encode())),
        "limit": None,
        "wall_s": 0.0,
        "start_s": 0.0,
        "usage": Usage(),
        "isolation": ISOLATION,
    }
    return ExecResult(**(values | changes))


class ScriptedRuntime:
    """Gives what it was told to, in order, the last one from then on; an exception is raised, a function is called."""

    name = "scripted"
    isolation = ISOLATION

    def __init__(self, *answers: ExecResult | Exception | Callable[[PythonProgram], Any]) -> None:
        self.answers = list(answers)
        self.programs: list[PythonProgram] = []
        self.limits: list[Limits] = []
        self.closed = False

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        self.programs.append(program)
        self.limits.append(limits)
        answer = self.answers[min(len(self.programs), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, ExecResult):
            return answer
        made = answer(program)
        return await made if asyncio.iscoroutine(made) else made

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        raise NotImplementedError

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True


def sandbox_of(runtime: ScriptedRuntime | Exception) -> WorkerSandbox:
    """A worker's sandbox with this runtime, or with one that cannot be made."""

    async def opened(name: str) -> Any:
        if isinstance(runtime, Exception):
            raise runtime
        return runtime

    return WorkerSandbox("scripted", opened)


def bubblewrap() -> WorkerSandbox:
    """A worker's sandbox of bubblewrap, without the self-test, which is tested elsewhere and takes its time."""

    async def opened(name: str) -> Runtime:
        return make_runtime(name)

    return WorkerSandbox("bubblewrap", opened)

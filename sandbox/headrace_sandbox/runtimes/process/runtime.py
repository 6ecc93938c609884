"""The runtime named ``process``: isolates nothing, and says so in every result. Made only where that is allowed.

* A program runs as this user, with its files and its network; only clocks, caps of output and rlimits hold.
* Its environment has PATH, HOME, LANG and the given variables, nothing of ours; it starts in a folder that is removed.
* Its process group is killed at its end; a process that left the group goes on.
* Limits that are not enforced here are not named: memory is bounded only for each process, processes are not bounded.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from headrace_sandbox.host.child_process import ChildProcess
from headrace_sandbox.host.descriptors import os_errors_as_failures
from headrace_sandbox.host.layout import program_environment
from headrace_sandbox.host.watch import watch_program
from headrace_sandbox.result import MOST_CPU_S, ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template, not_offered
from headrace_sandbox.runtimes.shared.guest_modules import guest_text

ACTIVE = ("wall_s", "output_bytes", "file_bytes", "open_files")

LIMIT_SIGNALS: dict[int, LimitName] = {-signal.SIGXCPU: "cpu", -signal.SIGXFSZ: "disk"}
"""Exit statuses with which the kernel ends a program at a limit."""

LAUNCHER = guest_text("rlimits")
"""Sets limits and becomes the program."""

MAIN_PROGRAM = guest_text("main_program")

READ_CODE = "import sys\nwith open(sys.argv[1], encoding='utf-8') as file:\n    sys.argv[1] = file.read()\n"
"""Replaces the first argument, a path, by the file's text: an argument itself holds 128 KiB at most."""


class ProcessRuntime:
    """The runtime."""

    name = "process"

    def __init__(self) -> None:
        self.isolation = Isolation(
            runtime=self.name, versions={"kernel": os.uname().release}, active=list(ACTIVE), is_sandbox=False
        )

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a process of its own. Raises SandboxFailure; cancelling the call kills it."""
        with os_errors_as_failures():
            return await self._run(command, limits)

    async def _run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        started_at = time.monotonic()
        scratch = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        try:
            await asyncio.to_thread(_write_files, scratch.name, command)
            child = _start(command, limits, scratch.name)
            start_s = time.monotonic() - started_at
            async with child:
                outcome = await watch_program(child.program, command.stdin, limits)
            code = child.returncode()
        finally:
            await asyncio.to_thread(scratch.cleanup)
        killed = outcome.limit is not None
        limit = outcome.limit if killed else LIMIT_SIGNALS.get(code)
        return ExecResult(
            exit_code=None if killed or code < 0 else code,
            signal=-code if code < 0 and not killed else None,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            limit=limit,
            wall_s=outcome.wall_s,
            work_s=outcome.work_s,
            start_s=start_s,
            usage=Usage(cpu_s=child.cpu_s()),
            isolation=self.isolation,
        )

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program by the interpreter of this process. Raises SandboxFailure; cancelling the call kills
        it."""
        with os_errors_as_failures(), tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
            file.write(program.code)
            file.flush()
            code = READ_CODE + MAIN_PROGRAM
            command = SandboxCommand(
                arguments=[sys.executable, "-I", "-X", "utf8", "-c", code, file.name, *program.arguments],
                stdin=program.stdin,
                files=program.files,
                environment=program.environment,
            )
            return await self.run(command, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Raises SandboxFailure ``not-offered``."""
        raise not_offered(self.name, "persistent sandboxes")

    async def close(self) -> None:
        """Do nothing: nothing is kept between executions."""


def _write_files(folder: str, command: SandboxCommand) -> None:
    for path, content in command.files.items():
        file = Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _start(command: SandboxCommand, limits: Limits, scratch: str) -> ChildProcess:
    rlimits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
    }
    if limits.cpu_s is not None:
        rlimits["RLIMIT_CPU"] = min(math.ceil(limits.cpu_s), MOST_CPU_S)
    arguments = [sys.executable, "-I", "-S", "-c", LAUNCHER, json.dumps(rlimits), *command.arguments]
    environment = {**program_environment(command.environment), "HOME": scratch, **command.environment}
    return ChildProcess(arguments, environment, scratch)

"""The runtime named ``process``: it isolates nothing, and says so in every result. Made only where that is allowed.

* A program runs as this user, with its files and its network; what holds are clocks, caps of output and rlimits.
* Its environment has PATH, HOME, LANG and what was given, nothing of ours; it starts in a folder that is removed.
* Everything in its process group is killed at its end; what left the group goes on.
* Limits that nothing here enforces are not named: memory is bounded for each process only, processes are not.
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

from headrace_sandbox import guest
from headrace_sandbox.host.bwrap import environment
from headrace_sandbox.host.child_process import Child
from headrace_sandbox.host.descriptors import refused_by_machine
from headrace_sandbox.host.watch import supervise
from headrace_sandbox.result import MOST_CPU_S, ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, not_offered

ACTIVE = ("wall_s", "output_bytes", "file_bytes", "open_files")

LIMIT_SIGNALS: dict[int, LimitName] = {-signal.SIGXCPU: "cpu", -signal.SIGXFSZ: "disk"}
"""By which the kernel says that a limit was run into."""

GUEST = Path(guest.__file__).parent

LAUNCHER = (GUEST / "rlimits.py").read_text()
"""Sets limits and becomes the program."""

PROGRAM = (GUEST / "main_program.py").read_text()

READ = "import sys\nwith open(sys.argv[1], encoding='utf-8') as file:\n    sys.argv[1] = file.read()\n"
"""An argument holds 128 KiB at most, so the program comes in a file."""


class Process:
    """The runtime."""

    name = "process"

    def __init__(self) -> None:
        self.isolation = Isolation(
            runtime=self.name, versions={"kernel": os.uname().release}, active=list(ACTIVE), is_sandbox=False
        )

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a process of its own. Raises SandboxFailure; cancelling the call kills it."""
        with refused_by_machine():
            return await self._run(command, limits)

    async def _run(self, command: Command, limits: Limits) -> ExecResult:
        begun_at = time.monotonic()
        scratch = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        try:
            await asyncio.to_thread(_fill, scratch.name, command)
            child = _start(command, limits, scratch.name)
            start_s = time.monotonic() - begun_at
            async with child:
                verdict = await supervise(child.started, command.stdin, limits)
            code = child.returncode()
        finally:
            await asyncio.to_thread(scratch.cleanup)
        killed = verdict.limit is not None
        limit = verdict.limit if killed else LIMIT_SIGNALS.get(code)
        return ExecResult(
            exit_code=None if killed or code < 0 else code,
            signal=-code if code < 0 and not killed else None,
            stdout=verdict.stdout,
            stderr=verdict.stderr,
            limit=limit,
            wall_s=verdict.wall_s,
            start_s=start_s,
            usage=Usage(cpu_s=child.cpu_s()),
            isolation=self.isolation,
        )

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program by the interpreter that runs this. Raises SandboxFailure; cancelling the call kills
        it."""
        with refused_by_machine(), tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
            file.write(program.code)
            file.flush()
            command = Command(
                arguments=[sys.executable, "-I", "-X", "utf8", "-c", READ + PROGRAM, file.name, *program.arguments],
                stdin=program.stdin,
                files=program.files,
                environment=program.environment,
            )
            return await self.run(command, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Not offered."""
        raise not_offered(self.name, "sandboxes that live on")

    async def close(self) -> None:
        """Nothing is kept between executions."""


def _fill(folder: str, command: Command) -> None:
    for path, content in command.files.items():
        file = Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _start(command: Command, limits: Limits, scratch: str) -> Child:
    rlimits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
    }
    if limits.cpu_s is not None:
        rlimits["RLIMIT_CPU"] = min(math.ceil(limits.cpu_s), MOST_CPU_S)
    arguments = [sys.executable, "-I", "-S", "-c", LAUNCHER, json.dumps(rlimits), *command.arguments]
    return Child(arguments, {**environment(command.environment), "HOME": scratch, **command.environment}, scratch)

"""gVisor as a runtime: programs talk to a kernel of their own in user space, not to that of this machine.

* A sandbox is a kernel of its own. Nothing that a program does to it reaches another one.
* Its memory and processors are those of a control group that holds the kernel too, which gets some memory more; its
  processes are bounded inside, because a kernel that the machine refuses a thread ends.
* A sandbox that its program brought down is the program's; one that was killed from outside is ours.
* It ends with this process, and at the end of its time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine

import msgspec

from headrace_sandbox.bwrap import environment
from headrace_sandbox.cgroups import Cgroup, Driver, Groups, find_driver
from headrace_sandbox.result import ExecResult, Isolation, Limits, Usage
from headrace_sandbox.runsc import PLATFORM, Container, Runsc
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, checked_path, not_offered
from headrace_sandbox.runtimes.guest import Guest, Program, first_command
from headrace_sandbox.runtimes.inside import PYTHON
from headrace_sandbox.runtimes.verdicts import ACTIVE, result_of, weak_limits
from headrace_sandbox.seccomp import require_filter
from headrace_sandbox.supervise import Verdict, supervise

KERNEL_BYTES = 96 << 20
"""Memory of the control group beyond that of the limits: gVisor's kernel and the process that opens files for it."""

KERNEL_THREADS = 512
"""Of the machine, for the kernel of a sandbox."""

THREADS_OF_ONE = 4
"""Of the machine, for each process inside."""

START_CPUS = 8.0
"""Processors while a sandbox starts: nothing of a program's runs then."""

KILLED = 137
"""How runsc ends when its kernel was killed by a signal: nothing inside can send that."""

RUN_TTL_S = 3600.0
"""Added to a command's time: its sandbox ends then, even if nobody is left to end it."""


class Gvisor:
    """The runtime. ``driver`` makes control groups; the best one that works is found if none is given."""

    name = "gvisor"

    def __init__(self, driver: Driver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``no-folder`` or ``no-filter``."""
        self._runsc = Runsc()
        self._filter = require_filter()
        self._groups = Groups(driver if driver is not None else find_driver())
        driver = self._groups.driver
        versions = {
            "runsc": self._runsc.version,
            "platform": PLATFORM,
            "kernel": os.uname().release,
            "cgroups": driver.name,
        }
        self.isolation = Isolation(
            runtime=self.name, versions=versions, active=[*ACTIVE, *dict.fromkeys(["pids", *driver.active])]
        )

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        made = await self._make(Template(limits=limits), limits.wall_s + RUN_TTL_S)
        try:
            return _of_fresh(await made.run(command, limits, begun_at))
        finally:
            await _to_the_end(made.close())

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        return await self.run(_command_of(program), limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Not offered yet."""
        raise not_offered(self.name, "sandboxes that live on")

    async def close(self) -> None:
        """Remove what is kept between executions."""
        self._groups.close()
        self._runsc.close()

    async def _make(self, template: Template, ttl_s: float) -> _Made:
        # It starts at full speed, and is bounded when something runs in it.
        group = self._groups.take(msgspec.structs.replace(_of_kernel(template.limits), cpus=START_CPUS))
        try:
            options = {"disk_bytes": template.limits.disk_bytes, "ttl_s": ttl_s, "filter": self._filter.hex()}
            container = self._runsc.start(template.image, first_command(options), group)
            made = _Made(self, template, container, group)
        except BaseException:
            self._groups.give_back(group)
            raise
        try:
            await made.guest.ready()
        except BaseException:
            await _to_the_end(made.close())
            raise
        return made

    def give_back(self, group: Cgroup) -> None:
        """A control group that was taken; what is left in it is killed."""
        self._groups.give_back(group)


class _Made:
    """A sandbox that was made, with its control group."""

    def __init__(self, runtime: Gvisor, template: Template, container: Container, group: Cgroup) -> None:
        self._runtime = runtime
        self._template = template
        self._container = container
        self._group = group
        self.guest = Guest(container, group)

    async def run(self, command: Command, limits: Limits, begun_at: float) -> ExecResult:
        """Run a command in it, from a call that began then. Raises SandboxFailure."""
        for path in command.files:
            checked_path(path)
        self._group.open(_of_kernel(self._template.limits))
        variables = environment({**self._template.environment, **command.environment})
        program, started = await self.guest.start(command.arguments, variables, self._rlimits(), command.files)
        start_s = time.monotonic() - begun_at
        verdict = await supervise(started, command.stdin, limits)
        return self._result(program, verdict, start_s)

    async def close(self) -> None:
        """End it; nothing of it is left."""
        self.guest.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._container.close()
        finally:
            self._runtime.give_back(self._group)

    def _rlimits(self) -> dict[str, int]:
        limits = self._template.limits
        bounds = {"nofile": limits.open_files, "fsize": limits.file_bytes, "core": 0, "nproc": limits.pids}
        if "memory_bytes" not in self._runtime.isolation.active:
            bounds |= weak_limits(limits)
        return {f"RLIMIT_{name.upper()}": value for name, value in bounds.items()}

    def _result(self, program: Program, verdict: Verdict, start_s: float) -> ExecResult:
        usage = self._group.usage()
        ended = program.ended
        if ended is not None and ended.left + 1 >= self._template.limits.pids:
            usage = msgspec.structs.replace(usage, refused_pids=max(1, usage.refused_pids))
        cause = self._cause(usage) if self.guest.is_gone else None
        if cause is None or verdict.limit is not None:
            return result_of(verdict, usage, start_s, self._runtime.isolation)
        return ExecResult(
            exit_code=None,
            signal=None,
            stdout=verdict.stdout,
            stderr=verdict.stderr,
            limit="memory" if usage.memory_kills else "pids" if usage.refused_pids else None,
            wall_s=verdict.wall_s,
            start_s=start_s,
            usage=usage,
            lost=cause,
            isolation=self._runtime.isolation,
        )

    def _cause(self, usage: Usage) -> str | None:
        """Why it has ended, where its program brought that about."""
        if usage.memory_kills:
            return "its processes ran into the limit of memory, and that ended the kernel of the sandbox"
        if usage.refused_pids:
            return "its processes ran into the limit of processes, and that ended the kernel of the sandbox"
        code = self._container.returncode()
        return None if code in (KILLED, -9) else f"the kernel of the sandbox ended with {code}"


def _of_kernel(limits: Limits) -> Limits:
    """The limits of the control group, which holds gVisor's kernel as well as what runs on it."""
    return msgspec.structs.replace(
        limits,
        memory_bytes=limits.memory_bytes + KERNEL_BYTES,
        pids=KERNEL_THREADS + THREADS_OF_ONE * limits.pids,
    )


def _of_fresh(result: ExecResult) -> ExecResult:
    """A sandbox that was made for one command is never used again: that a limit ended it is all there is to tell."""
    if result.lost is None or result.limit is None:
        return result
    return msgspec.structs.replace(result, lost=None, signal=signal.SIGKILL)


def _command_of(program: PythonProgram) -> Command:
    return Command(
        # Not isolated as a whole (-I): a program finds the modules that lie beside it.
        arguments=[PYTHON, "-E", "-s", "main.py", *program.arguments],
        stdin=program.stdin,
        files={**program.files, "main.py": program.code.encode(errors="surrogatepass")},
        environment=program.environment,
    )


async def _to_the_end(closing: Coroutine[None, None, None]) -> None:
    """Wait for it even if this call is cancelled meanwhile."""
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise

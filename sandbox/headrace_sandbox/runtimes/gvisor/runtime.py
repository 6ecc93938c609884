"""gVisor as a runtime: programs talk to a kernel of their own in user space, not to that of this machine.

* A sandbox is a kernel of its own. Nothing that a program does to it reaches another one.
* Commands and programs get a fresh one each, which is gone when they end.
* It ends with this process, and at the end of its time.
"""

from __future__ import annotations

import os
import signal
import time
import weakref

import msgspec

from headrace_sandbox.host.cgroups import Driver, Groups, find_driver
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.watch import to_the_end
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Template, check_ttl
from headrace_sandbox.runtimes.gvisor.persistent import GvisorSandbox, Surroundings
from headrace_sandbox.runtimes.gvisor.runsc import PLATFORM, Runsc
from headrace_sandbox.runtimes.shared.guest_programs import PYTHON
from headrace_sandbox.runtimes.shared.outcome import ACTIVE

RUN_TTL_S = 3600.0
"""Added to a command's time: its sandbox ends then, even if nobody is left to end it."""


class Gvisor:
    """The runtime. ``driver`` makes control groups; the best one that works is found if none is given."""

    name = "gvisor"

    def __init__(self, driver: Driver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``no-folder`` or ``no-filter``."""
        runsc, groups = Runsc(), Groups(driver if driver is not None else find_driver())
        versions = {
            "runsc": runsc.version,
            "platform": PLATFORM,
            "kernel": os.uname().release,
            "cgroups": groups.driver.name,
        }
        active = [*ACTIVE, *dict.fromkeys(["pids", *groups.driver.active])]
        self.isolation = Isolation(runtime=self.name, versions=versions, active=active)
        self._around = Surroundings(runsc, require_filter(), groups, self.isolation)
        self._sandboxes: weakref.WeakSet[GvisorSandbox] = weakref.WeakSet()

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        sandbox = await self.open(Template(limits=limits), limits.wall_s + RUN_TTL_S)
        try:
            return _of_fresh(await sandbox.run(command, limits, begun_at))
        finally:
            await to_the_end(sandbox.close())

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        return await self.run(_command_of(program), limits)

    async def open(self, template: Template, ttl_s: float) -> GvisorSandbox:
        """A sandbox that lives on. ``image`` is a folder with the files of a system. Raises SandboxFailure."""
        check_ttl(ttl_s)
        sandbox = GvisorSandbox(self._around, template, ttl_s)
        await sandbox.start()
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """End every sandbox, and remove what is kept."""
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        self._around.groups.close()
        self._around.runsc.close()


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

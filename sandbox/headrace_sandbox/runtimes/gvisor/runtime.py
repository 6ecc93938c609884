"""The runtime named ``gvisor``: programs run on a kernel of their own in user space, not on this machine's.

* A sandbox is a kernel of its own. A program's effects on it reach no other sandbox.
* Each command and program gets a fresh one, which is gone when it ends.
* It ends with this process, and at its expiry.
"""

from __future__ import annotations

import os
import signal
import time
import weakref

import msgspec

from headrace_sandbox.host.cgroups.cgroup import CgroupDriver
from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template, check_ttl
from headrace_sandbox.runtimes.gvisor.kernel import GvisorResources
from headrace_sandbox.runtimes.gvisor.runsc import PLATFORM, Runsc
from headrace_sandbox.runtimes.gvisor.sandbox import GvisorSandbox
from headrace_sandbox.runtimes.shared.exec_result import ACTIVE
from headrace_sandbox.runtimes.shared.guest_modules import PYTHON

RUN_TTL_S = 3600.0
"""Time to expiry of a command's sandbox beyond its limit: it ends then even if its supervisor cannot end it."""


class GvisorRuntime:
    """The runtime. ``driver`` makes control groups; without one, the best driver that works here."""

    name = "gvisor"

    def __init__(self, driver: CgroupDriver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``no-folder`` or ``no-filter``."""
        runsc, groups = Runsc(), CgroupPool(driver if driver is not None else find_driver())
        versions = {
            "runsc": runsc.version,
            "platform": PLATFORM,
            "kernel": os.uname().release,
            "cgroups": groups.driver.name,
        }
        active = [*ACTIVE, *dict.fromkeys(["pids", *groups.driver.active])]
        self.isolation = Isolation(runtime=self.name, versions=versions, active=active)
        self._resources = GvisorResources(runsc, require_filter(), groups, self.isolation)
        self._sandboxes: weakref.WeakSet[GvisorSandbox] = weakref.WeakSet()

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        sandbox = await self.open(Template(limits=limits), limits.whole_s + RUN_TTL_S)
        try:
            return _without_loss(await sandbox.run(command, limits, started_at))
        finally:
            await run_to_completion(sandbox.close())

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        return await self.run(_command_of(program), limits)

    async def open(self, template: Template, ttl_s: float) -> GvisorSandbox:
        """A persistent sandbox. ``image`` is a folder with the files of a system. Raises SandboxFailure."""
        check_ttl(ttl_s)
        sandbox = GvisorSandbox(self._resources, template, ttl_s)
        await sandbox.start()
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """End every sandbox, and remove everything that is kept."""
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        self._resources.groups.close()
        self._resources.runsc.close()


def _without_loss(result: ExecResult) -> ExecResult:
    """The result of a command that had a sandbox of its own, which is not used again: if a limit ended it, its loss
    does not matter."""
    if result.lost is None or result.limit is None:
        return result
    return msgspec.structs.replace(result, lost=None, signal=signal.SIGKILL)


def _command_of(program: PythonProgram) -> SandboxCommand:
    return SandboxCommand(
        # Without -I: a program can import the modules beside it.
        arguments=[PYTHON, "-E", "-s", "main.py", *program.arguments],
        stdin=program.stdin,
        files={**program.files, "main.py": program.code.encode(errors="surrogatepass")},
        environment=program.environment,
    )

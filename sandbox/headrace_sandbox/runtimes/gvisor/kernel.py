"""The kernel of a gVisor sandbox, in its control group.

* The group bounds the kernel together with the programs on it.
* The memory that the kernel uses at its start is added to the limit, and not counted as the programs' own.
* A kernel that was killed from outside is a fault of ours.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from headrace_sandbox.host.cgroups.cgroup import Cgroup
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.result import Isolation, Limits, Usage
from headrace_sandbox.runtimes.base import Template
from headrace_sandbox.runtimes.gvisor.connection import GuestConnection, init_command
from headrace_sandbox.runtimes.gvisor.runsc import Runsc, RunscProcess
from headrace_sandbox.runtimes.shared.exec_result import fallback_rlimits, sandbox_expired, sandbox_lost

START_BYTES = 1 << 30
"""The memory limit while a sandbox starts."""

KERNEL_THREADS, THREADS_PER_PROCESS = 512, 4
"""Threads of this machine that a kernel may have, and additional ones for each process inside."""

START_CPUS = 8.0
"""The processor limit while a sandbox starts: it runs no program then, and should not be slowed down."""

KILLED = (137, -9)
"""Exit statuses of runsc after SIGKILL for its kernel or itself, which no program inside can send."""

EXPIRED = 142
"""The exit status of runsc at the expiry of the sandbox."""


class GvisorResources(NamedTuple):
    """The runtime's resources for its sandboxes."""

    runsc: Runsc
    filter: bytes
    groups: CgroupPool
    isolation: Isolation


class GvisorKernel:
    """A running kernel."""

    def __init__(self, process: RunscProcess, group: Cgroup, groups: CgroupPool) -> None:
        self.guest = GuestConnection(process)
        self._process = process
        self._group = group
        self._groups = groups
        self._own_bytes = 0

    @classmethod
    async def start(cls, resources: GvisorResources, template: Template, ttl_s: float) -> GvisorKernel:
        """Start one. Raises SandboxFailure."""
        limits = template.limits
        threads = KERNEL_THREADS + THREADS_PER_PROCESS * limits.pids
        at_start = msgspec.structs.replace(limits, cpus=START_CPUS, memory_bytes=START_BYTES, pids=threads)
        group = resources.groups.acquire_blocking(at_start)
        try:
            options = {
                "disk_bytes": limits.disk_bytes,
                "ttl_s": ttl_s,
                "filter": resources.filter.hex(),
                "cpus": limits.cpus,
                "rlimits": _rlimits(limits, has_groups=bool(resources.groups.driver.active)),
            }
            process = resources.runsc.start(template.image, init_command(options), group)
        except BaseException:
            resources.groups.release_blocking(group)
            raise
        kernel = cls(process, group, resources.groups)
        try:
            await kernel.guest.wait_ready()
            kernel._set_limits(msgspec.structs.replace(limits, pids=threads), at_start)
        except BaseException:
            await run_to_completion(kernel.end())
            raise
        return kernel

    def _set_limits(self, limits: Limits, at_start: Limits) -> None:
        """Limit programs to these limits, beyond the kernel's present usage."""
        self._group.open(at_start)  # restarts the counts, so the peak is the present usage
        self._own_bytes = self._group.usage().peak_memory_bytes or 0
        self._group.open(msgspec.structs.replace(limits, memory_bytes=limits.memory_bytes + self._own_bytes))

    def usage(self) -> Usage:
        """The usage so far, without the kernel's memory at its start."""
        usage = self._group.usage()
        if usage.peak_memory_bytes is None:
            return usage
        return msgspec.structs.replace(usage, peak_memory_bytes=max(0, usage.peak_memory_bytes - self._own_bytes))

    def threads(self) -> list[int]:
        """The threads of the kernel and its programs on this machine."""
        return self._group.threads()

    async def why_gone(self) -> str:
        """The reason of its end, if its programs brought that about. Raises SandboxFailure ``sandbox-lost`` if it was
        ended from outside."""
        usage = self.usage()
        if usage.memory_kills:
            return "its processes ran into the limit of memory, and that ended its kernel"
        if usage.refused_pids:
            return "its processes ran into the limit of processes, and that ended its kernel"
        if self.guest.kill_reason is not None:
            return self.guest.kill_reason
        code = await asyncio.to_thread(self._process.returncode)
        if code in KILLED:
            raise sandbox_lost("The kernel of the sandbox was killed from outside.")
        if code == EXPIRED:
            raise sandbox_expired()
        return f"its kernel ended with {code}"

    async def end(self) -> None:
        """End it, and all that runs on it. Raises SandboxFailure ``unkillable``."""
        self.guest.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._process.close()
        finally:
            self._groups.release_blocking(self._group)


def _rlimits(limits: Limits, *, has_groups: bool) -> dict[str, int]:
    rlimits = {"nofile": limits.open_files, "fsize": limits.file_bytes, "core": 0, "nproc": limits.pids}
    if not has_groups:
        rlimits["as"] = fallback_rlimits(limits)["as"]
    return {f"RLIMIT_{name.upper()}": value for name, value in rlimits.items()}

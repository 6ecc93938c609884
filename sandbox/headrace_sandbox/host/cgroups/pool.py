"""Control groups that are used again, because making one costs milliseconds.

* A group is used again once nothing runs in it; its counts restart at 0. One that cannot be emptied is not used again.
* Ended processes that were not reaped yet do not reduce the next program's limit: the process that reaps them may be
  slow, or missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import Cgroup, CgroupDriver, new_group_name, no_cgroup
from headrace_sandbox.host.processes import processes_unkillable
from headrace_sandbox.result import Limits

LEFT_BYTES = 8 << 20
"""Memory that a group may still hold when it is used again."""

EMPTY_S = 2.0
"""Deadline for the end of the killed processes of a group."""


class CgroupPool:
    """Groups of one driver. The blocking calls wait for the kernel; the others are for an event loop."""

    def __init__(self, driver: CgroupDriver) -> None:
        self.driver = driver
        self._free: list[Cgroup] = []
        self._stuck: list[Cgroup] = []

    def acquire_blocking(self, limits: Limits) -> Cgroup:
        """An empty group with these limits. Raises SandboxFailure ``no-cgroup``."""
        try:
            group = self._pop_clean() or self.driver.make(new_group_name())
            try:
                group.open(msgspec.structs.replace(limits, pids=limits.pids + group.counted_pids()))
            except OSError:
                self._remove(group)
                raise
        except OSError as error:
            raise no_cgroup(error) from error
        return group

    def _remove(self, group: Cgroup) -> None:
        try:
            group.remove()
        except OSError:
            self._stuck.append(group)

    def _pop_clean(self) -> Cgroup | None:
        """A free group whose memory is free: the kernel frees files in memory a little after their processes."""
        for group in tuple(self._free):
            if (group.held_bytes() or 0) <= LEFT_BYTES:
                with contextlib.suppress(ValueError):  # another thread may have taken it
                    self._free.remove(group)
                    return group
        return None

    def release_blocking(self, group: Cgroup) -> None:
        """Kill the processes left in it, and make it free. Raises SandboxFailure ``unkillable``."""
        try:
            kill_group(group)
        except SandboxFailure:
            self._stuck.append(group)
            raise
        self._free.append(group)

    async def acquire(self, limits: Limits) -> Cgroup:
        """An empty group with these limits. Raises SandboxFailure ``no-cgroup``."""
        if self._free:  # most likely without any wait
            return self.acquire_blocking(limits)
        acquisition = asyncio.ensure_future(asyncio.to_thread(self.acquire_blocking, limits))
        try:
            return await asyncio.shield(acquisition)
        except asyncio.CancelledError:
            acquisition.add_done_callback(self._free_unused)
            raise

    def _free_unused(self, acquisition: asyncio.Future[Cgroup]) -> None:
        if not acquisition.cancelled() and acquisition.exception() is None:
            self._free.append(acquisition.result())

    async def release(self, group: Cgroup) -> None:
        """Kill the processes left in it, and make it free, even if the call is cancelled meanwhile. Raises
        SandboxFailure ``unkillable``."""
        if group.counted_pids() and group.pids():
            await asyncio.shield(asyncio.to_thread(self.release_blocking, group))
        else:
            self._free.append(group)

    def close(self) -> None:
        """Remove all free groups, and those that could not be emptied before if they are empty now."""
        while self._free:
            self._free.pop().remove()
        for group in self._stuck:
            with contextlib.suppress(OSError):
                group.remove()
        self._stuck.clear()


def kill_group(group: Cgroup) -> None:
    """Kill the processes of a group until it is empty. Raises SandboxFailure ``unkillable``."""
    deadline = time.monotonic() + EMPTY_S
    while pids := group.pids():
        if time.monotonic() > deadline:
            raise processes_unkillable(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)

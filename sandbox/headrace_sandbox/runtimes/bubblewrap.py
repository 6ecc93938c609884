"""The runtime named ``bubblewrap``: a fresh sandbox of namespaces for each command.

* The program starts only when its control group bounds it.
* Its process ids are its own, so its end is the end of all that it started.
* It cannot make namespaces, and the root of its files is read-only; the scratch folder is in bounded memory.
* What reaches beyond its namespaces is refused by a filter of system calls.
* It cannot reach the process that tells how it ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time

from headrace.errors import SandboxFailure
from headrace_sandbox import bwrap
from headrace_sandbox.bwrap import SCRATCH, Bwrap
from headrace_sandbox.cgroups import Cgroup, Driver, Groups, find_driver
from headrace_sandbox.result import ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import Command, checked_path
from headrace_sandbox.seccomp import require_filter
from headrace_sandbox.supervise import Started, Verdict, supervise

ACTIVE = ("wall_s", "output_bytes", "disk_bytes", "file_bytes", "open_files")
"""Limits that hold without control groups."""


class Bubblewrap:
    """The runtime. ``driver`` makes control groups; the best one that works is found if none is given."""

    def __init__(self, driver: Driver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-filter``."""
        self._bwrap = Bwrap()
        self._filter = require_filter()
        self._groups = Groups(driver if driver is not None else find_driver())
        self.isolation = isolation_of("bubblewrap", self._bwrap, self._groups.driver)

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        for path in command.files:
            checked_path(path)
        with contextlib.ExitStack() as stack:
            group = self._groups.take(limits)
            stack.callback(self._groups.give_back, group)
            started, waits = await self._start(command, limits, group, stack)
            start_s = time.monotonic() - begun_at
            verdict = await supervise(started, command.stdin, limits)
            if _is_unread(waits):  # it ended before it would have started the program
                raise bwrap.not_made(verdict.stderr.text.strip())
            usage = group.usage()
        return result_of(verdict, usage, start_s, self.isolation)

    def close(self) -> None:
        """Remove what is kept between executions."""
        self._groups.close()

    def _weak_limits(self, limits: Limits) -> list[str]:
        if self._groups.driver.active:
            return []
        return ["/usr/bin/prlimit", *(f"--{name}={value}" for name, value in weak_limits(limits).items()), "--"]

    async def _start(
        self, command: Command, limits: Limits, group: Cgroup, stack: contextlib.ExitStack
    ) -> tuple[Started, int]:
        """Make the sandbox, bound it, and let the program begin; gives where bubblewrap waits for that, too."""
        status, told = os.pipe()
        waits, go = os.pipe()
        for descriptor in (status, waits, go):
            stack.callback(os.close, descriptor)
        waits_inside = os.dup(waits)
        filter_ = bwrap.memory_file(self._filter)
        contents = {path: bwrap.memory_file(data) for path, data in command.files.items()}
        variables = bwrap.environment(command.environment).items()
        arguments = [
            *("--disable-userns", "--cap-drop", "ALL", *bwrap.system()),
            *("--size", f"{limits.disk_bytes}", "--tmpfs", SCRATCH, *bwrap.scratch_files(contents)),
            # Process 1 tells how the program ended, and is of the same user: its memory must be out of reach.
            *("--tmpfs", "/proc/1", "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", SCRATCH),
            *(part for name, value in variables for part in ("--setenv", name, value)),
            *("--seccomp", f"{filter_}", "--json-status-fd", f"{told}", "--block-fd", f"{waits_inside}"),
            *("--", *self._weak_limits(limits), *command.arguments),
        ]
        handed = [told, waits_inside, filter_, *contents.values()]
        process = self._bwrap.start(arguments, limits, handed, subprocess.PIPE)
        stack.callback(bwrap.reap, process)
        child = await bwrap.first_process(status)
        pidfd = None if child is None else admit(child, group, stack)
        if pidfd is None:
            process.kill()
            raise bwrap.not_made(process.communicate()[1].decode(errors="replace").strip())
        os.write(go, b"x")
        started = Started(
            stdin=bwrap.taken(process.stdin),
            stdout=bwrap.taken(process.stdout),
            stderr=bwrap.taken(process.stderr),
            end=os.pidfd_open(process.pid),
            returncode=lambda: _of_shell(process.wait()),
            kill=lambda: bwrap.kill(pidfd),
            cpu_s=lambda: group.usage().cpu_s,
        )
        return started, waits


def weak_limits(limits: Limits) -> dict[str, int]:
    """What rlimits can do where no control group bounds: processes of the sandbox's user, memory of each process."""
    return {"nproc": limits.pids, "as": limits.memory_bytes}


def _is_unread(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def admit(pid: int, group: Cgroup, stack: contextlib.ExitStack) -> int | None:
    """Put the first process of a sandbox into its group; gives a descriptor of it, or None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        group.add(pid)
    except ProcessLookupError:
        return None
    return pidfd


def sandbox_lost(detail: str) -> SandboxFailure:
    """The failure of a sandbox that ended by no doing of its program's and of no limit."""
    return SandboxFailure(detail, kind="sandbox-lost", retryable=True)


def isolation_of(runtime: str, bwrap_: Bwrap, driver: Driver) -> Isolation:
    """What isolates a runtime that is made of bubblewrap."""
    versions = {"bubblewrap": bwrap_.version, "kernel": os.uname().release, "cgroups": driver.name}
    return Isolation(runtime=runtime, versions=versions, active=[*ACTIVE, *driver.active])


def result_of(verdict: Verdict, usage: Usage, start_s: float, isolation: Isolation) -> ExecResult:
    """The result of an execution: a limit that ended it, or that it ran into before it failed, is named. Raises
    SandboxFailure ``sandbox-lost`` where nobody could tell how it ended, and no limit explains it."""
    limit = verdict.limit
    killed = limit is not None
    code = -signal.SIGKILL if verdict.returncode is None else verdict.returncode
    if limit is None and code != 0:
        limit = _limit_hit(usage)
    if verdict.returncode is None and not killed and limit != "memory":
        raise sandbox_lost("The sandbox ended under its program.")
    return ExecResult(
        exit_code=None if killed or code < 0 else code,
        signal=-code if code < 0 and not killed else None,
        stdout=verdict.stdout,
        stderr=verdict.stderr,
        limit=limit,
        wall_s=verdict.wall_s,
        start_s=start_s,
        usage=usage,
        isolation=isolation,
    )


def _limit_hit(usage: Usage) -> LimitName | None:
    if usage.memory_kills:
        return "memory"
    return "pids" if usage.refused_pids else None


def _of_shell(code: int) -> int:
    """bubblewrap ends with 128 + n for a program that signal n ended, as a shell does; here that is -n."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code

"""How an execution by bubblewrap ended, and what bounds it: what a fresh sandbox and a fork have in common.

* A limit that ended a program, or that it ran into before it failed, is named.
* An end that nobody could tell, and that no limit explains, is a fault of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal

from headrace.errors import SandboxFailure
from headrace_sandbox.host.bwrap import Bwrap
from headrace_sandbox.host.cgroups import Cgroup, Driver
from headrace_sandbox.host.watch import Verdict
from headrace_sandbox.result import ExecResult, Isolation, LimitName, Limits, Usage

ACTIVE = ("wall_s", "output_bytes", "disk_bytes", "file_bytes", "open_files")
"""Limits that hold without control groups."""

_turns = itertools.count()


def weak_limits(limits: Limits) -> dict[str, int]:
    """What rlimits can do where no control group bounds: processes of the sandbox's user, memory of each process."""
    return {"nproc": limits.pids, "as": limits.memory_bytes}


def admit(pid: int, group: Cgroup, limits: Limits, stack: contextlib.ExitStack) -> int | None:
    """Put the first process of a sandbox into its group, if it was not made there, and on as many processors as it may
    use, so that programs that count them start no more threads than that. Gives a descriptor of it, or None if it is
    gone."""
    try:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        if not group.entries:
            group.add(pid)
        if (usable := processors(limits.cpus)) is not None:
            os.sched_setaffinity(pid, usable)
    except ProcessLookupError:
        return None
    return pidfd


def processors(cpus: float) -> set[int] | None:
    """Those that a sandbox may use, the next ones in turn; None where it may use all that this process may."""
    here = sorted(os.sched_getaffinity(0))
    count = math.ceil(cpus)
    if count >= len(here):
        return None
    first = next(_turns) * count
    return {here[(first + step) % len(here)] for step in range(count)}


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
        limit = "disk" if code == -signal.SIGXFSZ else limit_hit(usage)
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


def limit_hit(usage: Usage) -> LimitName | None:
    """The limit that processes which failed ran into, as the kernel counted it."""
    if usage.memory_kills:
        return "memory"
    if usage.refused_pids:
        return "pids"
    return "disk" if usage.disk_full else None

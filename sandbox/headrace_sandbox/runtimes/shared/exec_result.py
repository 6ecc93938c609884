"""Turns the observed end of a program into its result, for every runtime that uses control groups.

* A limit that ended a program, or that it ran into before it failed, is named.
* An unknown end that no limit explains is a fault of ours.
"""

from __future__ import annotations

import signal

from headrace.errors import SandboxFailure
from headrace_sandbox.host.watch import ProgramOutcome
from headrace_sandbox.result import ExecResult, Isolation, LimitName, Limits, Output, Usage

ACTIVE = ("wall_s", "output_bytes", "disk_bytes", "file_bytes", "open_files")
"""Limits that hold without control groups."""

INODES = 10_000
"""Most files of a scratch folder: empty ones use none of its bytes, but memory of the kernel."""


def fallback_rlimits(limits: Limits) -> dict[str, int]:
    """The rlimits where no control group bounds: processes of the sandbox's user, memory of each process."""
    return {"nproc": limits.pids, "as": limits.memory_bytes}


def sandbox_lost(detail: str) -> SandboxFailure:
    """The failure of a sandbox that neither its program nor a limit ended."""
    return SandboxFailure(detail, kind="sandbox-lost", retryable=True)


def sandbox_closed() -> SandboxFailure:
    """The failure of a call to a closed sandbox."""
    return SandboxFailure("The sandbox was closed.", kind="closed", retryable=False)


def sandbox_expired() -> SandboxFailure:
    """The failure of a call to a sandbox whose ``ttl_s`` is over."""
    return SandboxFailure(
        "The sandbox's time is over.",
        hint="Open it with a larger ttl_s, or open another.",
        kind="expired",
        retryable=True,
    )


def exec_result(outcome: ProgramOutcome, usage: Usage, start_s: float, isolation: Isolation) -> ExecResult:
    """The result of an execution: a limit that ended it, or that it ran into before it failed, is named. Raises
    SandboxFailure ``sandbox-lost`` where its end is unknown and no limit explains it."""
    limit = outcome.limit
    killed = limit is not None
    code = -signal.SIGKILL if outcome.returncode is None else outcome.returncode
    if limit is None and code != 0:
        limit = "disk" if code == -signal.SIGXFSZ else limit_hit(usage)
    if outcome.returncode is None and not killed and limit != "memory":
        raise sandbox_lost("The sandbox ended under its program.")
    return ExecResult(
        exit_code=None if killed or code < 0 else code,
        signal=-code if code < 0 and not killed else None,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        limit=limit,
        wall_s=outcome.wall_s,
        work_s=outcome.work_s,
        start_s=start_s,
        usage=usage,
        isolation=isolation,
    )


def lost_result(reason: str, isolation: Isolation) -> ExecResult:
    """The result of a call to a sandbox that its program lost earlier."""
    return ExecResult(
        exit_code=None,
        signal=None,
        stdout=Output(),
        stderr=Output(),
        limit=None,
        wall_s=0.0,
        start_s=0.0,
        lost=reason,
        usage=Usage(),
        isolation=isolation,
    )


def limit_hit(usage: Usage) -> LimitName | None:
    """The limit that failed processes ran into, by the kernel's counts."""
    if usage.memory_kills:
        return "memory"
    if usage.refused_pids:
        return "pids"
    return "disk" if usage.disk_full else None

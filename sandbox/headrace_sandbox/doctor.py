"""The report of ``headrace sandbox doctor``: a self-test of each runtime on this machine, with hints for failures.

* Every runtime has a row, whether it comes with Headrace or by an entry point, and whether it works or not.
* A runtime that raises, hangs or does not isolate has failed; the evidence is in its row, the remedy below it.
* ``process`` is never more than a warning: it is not a sandbox.
* The best runtime that passes is reported: the cheapest of those that run any command, else the cheapest of the others.
  It never replaces the default: a user has to choose it by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import HeadraceError, SandboxFailure
from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Runtime, SandboxCommand
from headrace_sandbox.runtimes.registry import DEFAULT, make_runtime_in_time, runtime_names
from headrace_sandbox.runtimes.self_test import SelfTest, self_test, self_test_failed

CheckVerdict = Literal["ok", "warn", "fail"]

CLOSE_S = 20.0
"""Time limit for closing a runtime."""

APPARMOR = """\
AppArmor refuses user namespaces, which is the default of Ubuntu 24.04. Write this to /etc/apparmor.d/bwrap, and run
`apparmor_parser -r /etc/apparmor.d/bwrap`:
    abi <abi/4.0>,
    include <tunables/global>
    profile bwrap /usr/bin/bwrap flags=(unconfined) {
      userns,
      include if exists <local/bwrap>
    }"""

USERNS_CLONE = "The kernel refuses user namespaces to users: its sysctl kernel.unprivileged_userns_clone is 0 (Debian)."

NO_USERNS = "The kernel refuses user namespaces: its sysctl user.max_user_namespaces is 0."

CONTAINER = """\
This process is under a filter of system calls, most likely a container's, and that refuses user namespaces. The profile
of the container must allow them. Under Kubernetes' restricted profile this cannot be changed inside the pod; the
runtime wasm needs no namespaces."""

NO_GROUPS = (
    "Run as root, or delegate cpu, memory and pids to this user (systemd: Delegate=yes for its user@.service). "
    "Until then memory is bounded for each process only, and usage is not counted."
)

NOT_ROOT = (
    "Only root can run each sandbox as a user of its own, so that a program that escapes finds no files of its user. "
    "Without root, run Headrace as a user that owns nothing else."
)


class DoctorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the report. ``found``: the evidence in a line. ``hint``: the remedy where it is not ok. ``active``:
    limits that are enforced. ``cost_s``: seconds of one ``print(1)``, by the kind of execution. ``any_command``: True
    if it runs any command, not Python alone."""

    verdict: CheckVerdict
    name: str
    found: str
    hint: str = ""
    versions: dict[str, str] = {}
    active: list[str] = []
    cost_s: dict[str, float] = {}
    any_command: bool = False


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of this machine. ``machine``: features that runtimes build on. ``default``: the runtime where none is
    named. ``best``: the best runtime that passes, if any."""

    machine: list[DoctorRow]
    runtimes: list[DoctorRow]
    default: str
    best: str | None


async def diagnose(say: Callable[[str], None]) -> DoctorReport:
    """Test every runtime, one after the other. ``say`` receives progress messages."""
    rows = [await check_runtime(name, say) for name in runtime_names()]
    return DoctorReport(machine=[_control_groups(), _users()], runtimes=rows, default=DEFAULT, best=best_of(rows))


def best_of(rows: list[DoctorRow]) -> str | None:
    """The best runtime that passes."""
    passed = [row for row in rows if row.verdict == "ok"]
    best = min(passed, key=lambda row: (not row.any_command, min(row.cost_s.values(), default=math.inf)), default=None)
    return None if best is None else best.name


async def check_runtime(name: str, say: Callable[[str], None]) -> DoctorRow:
    """Test one runtime."""
    try:
        runtime = await make_runtime_in_time(name, allow_unsafe=True)
        try:
            result = await self_test(runtime, say)
            any_command = result.passed and await _runs_any_command(runtime)
        finally:
            await _close(runtime)
    except Exception as error:  # noqa: BLE001 - a runtime of a third party may raise anything
        return _failed(name, error)
    return _row(name, result, any_command)


async def _runs_any_command(runtime: Runtime) -> bool:
    try:
        await runtime.run(SandboxCommand(arguments=["true"]), Limits())
    except SandboxFailure as failure:
        if failure.kind != "not-offered":
            raise
        return False
    return True


async def _close(runtime: Runtime) -> None:
    try:
        async with timeout(CLOSE_S):
            await runtime.close()
    except TimeoutError:
        raise self_test_failed(runtime.name, f"it did not close within {CLOSE_S:g} s") from None


def _row(name: str, result: SelfTest, any_command: bool) -> DoctorRow:
    verdict: CheckVerdict = "ok"
    found, hint = ", ".join(result.proven), result.hint
    if not result.passed:
        verdict, found = "fail", f"does not hold: {'; '.join(result.missing)}"
    elif not result.isolation.is_sandbox:
        verdict = "warn"
        found = "not a sandbox: programs run as this user, with its files and its network"
        hint = "Only for programs that you trust; it is refused without allow_unsafe=True (--allow-unsafe)."
    isolation = result.isolation
    return DoctorRow(
        verdict=verdict,
        name=name,
        found=found,
        hint=hint,
        versions=isolation.versions,
        active=isolation.active,
        cost_s=result.cost_s,
        any_command=any_command,
    )


def _failed(name: str, error: Exception) -> DoctorRow:
    if not isinstance(error, HeadraceError):
        return DoctorRow(
            verdict="fail", name=name, found=f"{type(error).__name__}: {error}", hint="This is a defect of the runtime."
        )
    is_refused = isinstance(error, SandboxFailure) and error.kind == "sandbox-not-made"
    hint = remedy(_read) if name == "bubblewrap" and is_refused else error.hint
    return DoctorRow(verdict="fail", name=name, found=error.detail, hint=hint)


def remedy(read: Callable[[str], str]) -> str:
    """The cause of refused user namespaces here, and what to do about it. ``read`` returns the content of a file of
    /proc, or an empty string."""
    refusals = (
        (read("sys/kernel/apparmor_restrict_unprivileged_userns") == "1", APPARMOR),
        (read("sys/kernel/unprivileged_userns_clone") == "0", USERNS_CLONE),
        (read("sys/user/max_user_namespaces") == "0", NO_USERNS),
        ("\nSeccomp:\t2" in read("self/status"), CONTAINER),
    )
    return "\n".join([text for holds, text in refusals if holds] or [text for _, text in refusals])


def _read(name: str) -> str:
    try:
        return Path("/proc", name).read_text().strip()
    except OSError:
        return ""


def _users() -> DoctorRow:
    if os.geteuid() == 0:
        return DoctorRow(verdict="ok", name="users", found="each sandbox runs as a user of its own, which owns nothing")
    found = "sandboxes run as this user, in namespaces of their own where those are available"
    return DoctorRow(verdict="warn", name="users", found=found, hint=NOT_ROOT)


def _control_groups() -> DoctorRow:
    driver = find_driver()
    if driver.active:
        return DoctorRow(verdict="ok", name="control groups", found=driver.name, active=list(driver.active))
    return DoctorRow(
        verdict="warn", name="control groups", found="this process may not make control groups", hint=NO_GROUPS
    )

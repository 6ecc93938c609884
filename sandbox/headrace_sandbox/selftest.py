"""Whether a runtime isolates here: found out by running a program in it that looks around.

* A runtime that was asked for and fails is an error with the evidence; nothing weaker takes its place.
* Each finding says what was found, and what to do about it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.cgroups import find_driver
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram
from headrace_sandbox.runtimes.bubblewrap import Bubblewrap
from headrace_sandbox.runtimes.forkserver import ForkServer
from headrace_sandbox.runtimes.inside import PYTHON

LIMITS = Limits(wall_s=20.0)

LOOK_AROUND = (Path(__file__).parent / "inside" / "look_around.py").read_text()
"""Tells what it finds; every item must be true."""

NAMESPACES_OFF = (
    "User namespaces are switched off here. Debian and Ubuntu: sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns, or an AppArmor profile for bwrap with the rule `userns`. In a "
    "container: its profile must allow them; under Kubernetes' restricted profile it does not."
)

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of what was found. ``hint`` says what to do where it is not ok."""

    verdict: Verdict
    name: str
    found: str
    hint: str = ""


async def findings() -> list[Finding]:
    """What this machine has for sandboxes."""
    return [_cgroups(), await _bubblewrap(), await _fork_server()]


def _cgroups() -> Finding:
    driver = find_driver()
    if driver.active:
        return Finding(verdict="ok", name="control groups", found=f"{driver.name}: {', '.join(driver.active)}")
    return Finding(
        verdict="warn",
        name="control groups",
        found="none that this process may make: memory is bounded for each process only, and nothing is counted",
        hint="Run as root, or delegate a group with the controllers cpu, memory and pids to this user.",
    )


async def _bubblewrap() -> Finding:
    try:
        runtime = Bubblewrap()
        result = await runtime.run(Command(arguments=[PYTHON, "-I", "-c", LOOK_AROUND]), LIMITS)
        await runtime.close()
    except SandboxFailure as failure:
        return _failed("bubblewrap", failure)
    return _judged("bubblewrap", f"bubblewrap {result.isolation.versions['bubblewrap']}", result)


async def _fork_server() -> Finding:
    try:
        server = ForkServer()
        result = await server.run(PythonProgram(code=LOOK_AROUND), LIMITS)
        await server.close()
    except SandboxFailure as failure:
        return _failed("fork server", failure)
    return _judged("fork server", f"made in {result.start_s:.2f} s", result)


def _judged(name: str, found: str, result: ExecResult) -> Finding:
    if result.fault:
        return Finding(
            verdict="fail",
            name=name,
            found=f"the self-test ended with {result.exit_code}: {result.stderr.text.strip()[-300:]}",
            hint=f"It runs {PYTHON}. Is that installed?",
        )
    seen: dict[str, bool] = json.loads(result.stdout.text)
    missing = [what for what, holds in seen.items() if not holds]
    if missing:
        hint = "This runtime does not isolate here; do not use it, and report it as a defect of Headrace."
        return Finding(verdict="fail", name=name, found=f"not isolated: {', '.join(missing)}", hint=hint)
    return Finding(verdict="ok", name=name, found=f"{found}; {', '.join(seen)}")


def _failed(name: str, failure: SandboxFailure) -> Finding:
    hint = NAMESPACES_OFF if failure.kind == "sandbox-not-made" else failure.hint
    return Finding(verdict="fail", name=name, found=failure.detail, hint=hint)

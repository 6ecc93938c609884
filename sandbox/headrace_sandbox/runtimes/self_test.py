"""Tests that a runtime isolates on this machine, with programs inside that try forbidden things.

* It is tested with both kinds of programs that it offers: Python programs, and commands.
* An endless program must end at its time limit, and a program must not get more memory than its limit.
* The test has a deadline: a runtime that hangs has failed.
* A runtime that isolates nothing passes if it runs programs; the result says that it is not a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, SandboxCommand
from headrace_sandbox.runtimes.shared.guest_modules import guest_text

SELF_TEST_S = 60.0
"""Deadline for the whole test, on a busy machine. gVisor, the slowest, takes some seconds."""

PREPARE_S = 600.0
"""Deadline for a runtime's preparation."""

LIMITS = Limits(wall_s=20.0)
SHORT_LIMITS = Limits(wall_s=0.3)
SMALL_LIMITS = Limits(wall_s=20.0, memory_bytes=128 << 20)

PROBE = guest_text("isolation_probe")

ENDLESS = "while True:\n    pass"

LARGE_ALLOCATION = "held = bytearray(512 << 20)"

PRINT = "print(1)"

QUOTED_CHARACTERS = 300
"""The quoted length of a program's output."""

RunPython = Callable[[str, tuple[str, ...], Limits], Awaitable[ExecResult]]
"""Runs Python code with arguments, under limits."""


@runtime_checkable
class SupportsPrepare(Protocol):
    """A runtime that needs a preparation before its first use."""

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Prepare it, unless that was done before; ``say`` is called before slow steps. Raises SandboxFailure."""
        ...


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a self-test. ``proven``: properties that hold. ``missing``: properties that do not; empty if it
    passed. ``hint``: the remedy. ``cost_s``: seconds of one ``print(1)``, all included, by the kind of program."""

    isolation: Isolation
    proven: list[str] = []
    missing: list[str] = []
    hint: str = ""
    cost_s: dict[str, float] = {}

    @property
    def passed(self) -> bool:
        """True if the runtime may be used."""
        return not self.missing


async def self_test(runtime: Runtime, say: Callable[[str], None] = lambda _: None) -> SelfTest:
    """Test a runtime. Raises the runtime's own SandboxFailure, or ``self-test-failed`` if it hangs."""
    try:
        if isinstance(runtime, SupportsPrepare):
            async with timeout(PREPARE_S):
                await runtime.prepare(say)
        async with timeout(SELF_TEST_S):
            return await _test(runtime)
    except TimeoutError:
        raise self_test_failed(runtime.name, f"it did not end within {SELF_TEST_S:g} s") from None


def self_test_failed(name: str, evidence: str, hint: str = "") -> SandboxFailure:
    """The failure of a runtime that must not be used here."""
    return SandboxFailure(
        f"The runtime {name} failed its self-test: {evidence}.",
        hint=hint or "`headrace sandbox doctor` shows what each runtime here does.",
        kind="self-test-failed",
        retryable=False,
    )


async def _test(runtime: Runtime) -> SelfTest:
    runners: list[RunPython] = []
    cost_s: dict[str, float] = {}
    for name, run in (("code", _as_code(runtime)), ("command", _as_command(runtime))):
        try:
            await run(PRINT, (), LIMITS)  # so that one-time costs are not counted
        except SandboxFailure as failure:
            if failure.kind == "not-offered":
                continue
            raise
        started_at = time.monotonic()
        printed = await run(PRINT, (), LIMITS)
        cost_s[name] = round(time.monotonic() - started_at, 4)
        if printed.exit_code != 0 or printed.stdout.head != b"1\n":
            missing = [f"prints 1 ({_describe_end(printed)})"]
            return SelfTest(isolation=printed.isolation, missing=missing, hint="The sandbox needs a python3 inside.")
        runners.append(run)
    holds: dict[str, bool] = {}
    for results in await asyncio.gather(*(_probe(run, runtime.isolation) for run in runners)):
        holds |= {name: is_so and holds.get(name, True) for name, is_so in results.items()}
    return _self_test_result(runtime.isolation, holds, cost_s)


def _self_test_result(isolation: Isolation, holds: dict[str, bool], cost_s: dict[str, float]) -> SelfTest:
    proven, missing = ([name for name, is_so in holds.items() if is_so is value] for value in (True, False))
    if not isolation.is_sandbox:
        return SelfTest(isolation=isolation, proven=proven, cost_s=cost_s)
    hint = "It does not isolate here; do not use it, and report this as a defect." if missing else ""
    return SelfTest(isolation=isolation, proven=proven, missing=missing, hint=hint, cost_s=cost_s)


async def _probe(run: RunPython, isolation: Isolation) -> dict[str, bool]:
    with _forbidden_things() as arguments:
        probed, endless = await asyncio.gather(run(PROBE, arguments, LIMITS), run(ENDLESS, (), SHORT_LIMITS))
    try:
        results: dict[str, bool] = json.loads(probed.stdout.text)
    except ValueError:
        return {f"runs the probe ({_describe_end(probed)})": False}
    results["an end in time"] = endless.limit == "time"
    if "memory_bytes" in isolation.active:
        results["bounded memory"] = (await run(LARGE_ALLOCATION, (), SMALL_LIMITS)).exit_code != 0
    return results


def _describe_end(result: ExecResult) -> str:
    output = result.stderr.text.strip()[-QUOTED_CHARACTERS:] or result.stdout.text.strip()[-QUOTED_CHARACTERS:]
    return f"it ended with {result.exit_code}, and wrote {output!r}"


@contextlib.contextmanager
def _forbidden_things() -> Iterator[tuple[str, str, str]]:
    """Things that a program inside must not find: a file, and a process with its start time."""
    with tempfile.NamedTemporaryFile(prefix="headrace-canary-", delete=False) as file:
        file.write(secrets.token_bytes(8))
    os.chmod(file.name, 0o644)
    try:
        start_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        start_ticks = ""
    try:
        yield file.name, str(os.getpid()), start_ticks
    finally:
        os.unlink(file.name)


def _as_code(runtime: Runtime) -> RunPython:
    return lambda code, arguments, limits: runtime.run_code(PythonProgram(code=code, arguments=arguments), limits)


def _as_command(runtime: Runtime) -> RunPython:
    return lambda code, arguments, limits: runtime.run(
        SandboxCommand(arguments=["python3", "-I", "-c", code, *arguments]), limits
    )

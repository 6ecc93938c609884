"""Whether a runtime isolates here: found out by running programs in it that try what must not work.

* It is tried in each way that it offers: Python programs, and commands.
* A program that has no end is ended by its time, and one that takes more memory than it may does not get it.
* Everything has an end: a runtime that hangs has failed.
* What isolates nothing passes if it runs programs; that it is no sandbox is said.
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
from headrace_sandbox import guest
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Runtime

SELF_TEST_S = 60.0
"""For all of it, on a busy machine. gVisor, the slowest, takes some seconds."""

PREPARE_S = 600.0
"""For what is made once."""

LIMITS = Limits(wall_s=20.0)
SHORT = Limits(wall_s=0.3)
SMALL = Limits(wall_s=20.0, memory_bytes=128 << 20)

LOOK_AROUND = (Path(guest.__file__).parent / "isolation_probe.py").read_text()

NO_END = "while True:\n    pass"

MUCH_MEMORY = "held = bytearray(512 << 20)"

PRINT = "print(1)"

QUOTED = 300
"""Characters of what a program said."""

Way = Callable[[str, tuple[str, ...], Limits], Awaitable[ExecResult]]
"""Runs Python code with arguments in limits."""


@runtime_checkable
class Prepares(Protocol):
    """A runtime that makes something once, before its first use."""

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Make what is missing; ``say`` is told what takes long. Raises SandboxFailure."""
        ...


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``proven``: what holds. ``missing``: what does not; empty where it passed. ``hint``: what to do.
    ``cost_s``: seconds of one ``print(1)``, all included, by the way it was run."""

    isolation: Isolation
    proven: list[str] = []
    missing: list[str] = []
    hint: str = ""
    cost_s: dict[str, float] = {}

    @property
    def passed(self) -> bool:
        """Whether it may be used."""
        return not self.missing


async def self_test(runtime: Runtime, say: Callable[[str], None] = lambda _: None) -> SelfTest:
    """Try a runtime. Raises the SandboxFailure that it raises, and ``self-test-failed`` where it hangs."""
    try:
        if isinstance(runtime, Prepares):
            async with timeout(PREPARE_S):
                await runtime.prepare(say)
        async with timeout(SELF_TEST_S):
            return await _tried(runtime)
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


async def _tried(runtime: Runtime) -> SelfTest:
    ways: list[Way] = []
    cost_s: dict[str, float] = {}
    for name, way in (("code", _as_code(runtime)), ("command", _as_command(runtime))):
        try:
            await way(PRINT, (), LIMITS)  # what is made once, and kept warm, is no part of the cost
        except SandboxFailure as failure:
            if failure.kind == "not-offered":
                continue
            raise
        begun_at = time.monotonic()
        printed = await way(PRINT, (), LIMITS)
        cost_s[name] = round(time.monotonic() - begun_at, 4)
        if printed.exit_code != 0 or printed.stdout.head != b"1\n":
            missing = [f"prints 1 ({_said(printed)})"]
            return SelfTest(isolation=printed.isolation, missing=missing, hint="It needs a python3 inside.")
        ways.append(way)
    holds: dict[str, bool] = {}
    for found in await asyncio.gather(*(_looked_at(way, runtime.isolation) for way in ways)):
        holds |= {what: is_so and holds.get(what, True) for what, is_so in found.items()}
    return _judged(runtime.isolation, holds, cost_s)


def _judged(isolation: Isolation, holds: dict[str, bool], cost_s: dict[str, float]) -> SelfTest:
    proven, missing = ([what for what, is_so in holds.items() if is_so is wanted] for wanted in (True, False))
    if not isolation.is_sandbox:
        return SelfTest(isolation=isolation, proven=proven, cost_s=cost_s)
    hint = "It does not isolate here; do not use it, and report it as a defect." if missing else ""
    return SelfTest(isolation=isolation, proven=proven, missing=missing, hint=hint, cost_s=cost_s)


async def _looked_at(way: Way, isolation: Isolation) -> dict[str, bool]:
    with _outside() as arguments:
        looked, endless = await asyncio.gather(way(LOOK_AROUND, arguments, LIMITS), way(NO_END, (), SHORT))
    try:
        found: dict[str, bool] = json.loads(looked.stdout.text)
    except ValueError:
        return {f"can look around ({_said(looked)})": False}
    found["an end in time"] = endless.limit == "time"
    if "memory_bytes" in isolation.active:
        found["bounded memory"] = (await way(MUCH_MEMORY, (), SMALL)).exit_code != 0
    return found


def _said(result: ExecResult) -> str:
    said = result.stderr.text.strip()[-QUOTED:] or result.stdout.text.strip()[-QUOTED:]
    return f"it ended with {result.exit_code}, and said {said!r}"


@contextlib.contextmanager
def _outside() -> Iterator[tuple[str, str, str]]:
    """What a program inside must not find: a file, and a process with the time of its start."""
    with tempfile.NamedTemporaryFile(prefix="headrace-canary-", delete=False) as file:
        file.write(secrets.token_bytes(8))
    os.chmod(file.name, 0o644)
    try:
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = ""
    try:
        yield file.name, str(os.getpid()), began
    finally:
        os.unlink(file.name)


def _as_code(runtime: Runtime) -> Way:
    return lambda code, arguments, limits: runtime.run_code(PythonProgram(code=code, arguments=arguments), limits)


def _as_command(runtime: Runtime) -> Way:
    return lambda code, arguments, limits: runtime.run(
        Command(arguments=["python3", "-I", "-c", code, *arguments]), limits
    )

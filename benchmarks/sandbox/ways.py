"""Ways to run ``print(1)``, each as a call that waits for its output."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.registry import make_runtime
from headrace_sandbox.runtimes.shared.guest_modules import PYTHON

LIMITS = Limits()
"""The default limits."""

PROGRAM = PythonProgram(code="print(1)")
COMMAND = SandboxCommand(arguments=["python3", "-c", "print(1)"])

TTL_S = 600.0

Way = Callable[[], Awaitable[ExecResult | None]]


async def bare() -> None:
    """Run the system's interpreter without isolation and limits."""
    await asyncio.to_thread(subprocess.run, [PYTHON, "-c", "print(1)"], capture_output=True, check=True)


async def open_persistent(name: str) -> tuple[Sandbox | None, str]:
    """A persistent sandbox of a runtime; or None, with the reason."""
    try:
        return await make_runtime(name).open(Template(), TTL_S), ""
    except SandboxFailure as failure:
        return None, failure.detail


async def in_turns(ways: Mapping[str, Way], rounds: int, *, warmup_rounds: int = 5) -> dict[str, float]:
    """The median time of each way in milliseconds, without the first rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warmup_rounds + rounds):
        for name, way in ways.items():
            started_at = time.perf_counter()
            result = await way()
            if result is not None and result.stdout.text != "1\n":
                raise SystemExit(f"{name}: {result.stdout.text} {result.stderr.text}")
            if number >= warmup_rounds:
                times[name].append(1e3 * (time.perf_counter() - started_at))
    return {name: median(times_ms) for name, times_ms in times.items()}

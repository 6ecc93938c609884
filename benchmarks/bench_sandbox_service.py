"""Time that the sandbox service adds to an execution: the same program directly and through a service, alternately;
and through a service whose runtime does nothing, to measure the service alone.

After an execution its slot forks the next child, which slows the next measurement. So in the order of measurements
each way follows each other way equally often.

The figures are medians, and lower quartiles, which are more reliable on a busy machine.

    python -m benchmarks.bench_sandbox_service
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

from benchmarks.table import Row, missing, report
from headrace.errors import SandboxFailure
from headrace_sandbox.client import client_of
from headrace_sandbox.pool.messages import PoolSettings
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.service.server import serve_with
from headrace_sandbox.service.settings import ServiceSettings

ORDER = ("direct", "service", "nothing", "direct", "nothing", "service")
"""Order of the measurements of a round; rounds follow one another without a pause."""

ROUNDS, WARM_UP = 200, 10
LIMITS = Limits(memory_bytes=64 << 20)
PROGRAM = PythonProgram(code="print(1)")

MAX_ADDED_MS = 1.0
"""Limit of the time that the service adds."""


class NullRuntime:
    """A runtime that returns a result at once, without running anything."""

    name = "nothing"
    isolation = Isolation(runtime="nothing", versions={}, active=[])
    result = ExecResult(
        exit_code=0,
        signal=None,
        stdout=Output(head=b"1\n", total_bytes=2),
        stderr=Output(),
        limit=None,
        wall_s=0.0,
        start_s=0.0,
        usage=Usage(),
        isolation=isolation,
    )

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return self.result

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        return self.result

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def serve(name: str, path: str) -> None:
    """Serve a runtime until killed."""
    import uvloop

    async def until_killed() -> None:
        runtime: Runtime = NullRuntime() if name == "nothing" else BubblewrapRuntime()
        settings = ServiceSettings(runtime=name, socket=Path(path), pool=PoolSettings(), log_level="warning")
        await serve_with(runtime, settings, ready=lambda address: print(address, flush=True), stop=asyncio.Event())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_killed())


async def timed(call: Callable[[PythonProgram, Limits], Awaitable[ExecResult]]) -> float:
    """Run the program; return the milliseconds."""
    started_at = time.perf_counter()
    result = await call(PROGRAM, LIMITS)
    assert result.stdout.text == "1\n"
    return 1e3 * (time.perf_counter() - started_at)


async def measure(folder: str) -> dict[str, list[float]]:
    """Return the milliseconds of each execution, by way."""
    direct = BubblewrapRuntime()
    through, nothing = client_of(f"unix://{folder}/bubblewrap"), client_of(f"unix://{folder}/nothing")
    ways = {"direct": direct.run_code, "service": through.run_code, "nothing": nothing.run_code}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + ROUNDS):
        for name in ORDER:
            took_ms = await timed(ways[name])
            if number >= WARM_UP:
                times[name].append(took_ms)
    for runtime in (through, nothing, direct):
        await runtime.close()
    return times


def main() -> None:
    try:
        BubblewrapRuntime()
    except SandboxFailure as error:
        report("sandbox-service", [missing("run_code through the service", str(error))])
    else:
        report("sandbox-service", compare())


def compare() -> list[Row]:
    """Compare the service with direct calls, at the median and at the lower quartile."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen([sys.executable, "-m", __spec__.name, name, f"{folder}/{name}"], stdout=subprocess.PIPE)
            for name in ("bubblewrap", "nothing")
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                times = runner.run(measure(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    rows = []
    for quarter, name in ((1, "median"), (0, "lower quartile")):
        direct, through, nothing = (quantiles(times[way], n=4)[quarter] for way in ("direct", "service", "nothing"))
        limit = f"limit of that, {name}"
        rows += [
            Row(f"run_code through the service, {name}", through, "ms", "directly", direct, 1.5, "lower"),
            Row("time that the service adds", through - direct, "ms", limit, MAX_ADDED_MS, 1.0, "lower"),
            Row("the service alone (a runtime that does nothing)", nothing, "ms", limit, MAX_ADDED_MS, 1.0, "lower"),
        ]
    return rows


if __name__ == "__main__":
    serve(*sys.argv[1:]) if len(sys.argv) > 1 else main()

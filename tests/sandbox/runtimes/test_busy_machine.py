"""The time limit of real programs on a busy machine: only a program's own work counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox import result
from headrace_sandbox.graders.cases import StdioCase
from headrace_sandbox.graders.grader import grade
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.process.runtime import ProcessRuntime

pytestmark = pytest.mark.component("bubblewrap")

MANY = 6 * len(os.sched_getaffinity(0))

COMPUTE = "import time\nwhile time.process_time() < 0.2: pass\nprint(1)"
LIMITS = Limits(wall_s=0.5)

RunPython = Callable[[str, Limits], Awaitable[ExecResult]]


@pytest.fixture(params=["fork", "fresh sandbox", "persistent sandbox", "process"])
async def run_python(request: pytest.FixtureRequest) -> AsyncIterator[RunPython]:
    """Runs a Python program, in each way."""
    runtime: Any = ProcessRuntime() if request.param == "process" else BubblewrapRuntime()

    async def run(code: str, limits: Limits) -> ExecResult:
        command = SandboxCommand(arguments=["python3", "-I", "-S", "-c", code])
        if request.param == "fork":
            answer: ExecResult = await runtime.run_code(PythonProgram(code=code), limits)
        elif request.param == "persistent sandbox":
            sandbox = await runtime.open(Template(), 600.0)
            answer = await sandbox.run(command, limits)
            await sandbox.close()
        else:
            answer = await runtime.run(command, limits)
        return answer

    yield run
    await runtime.close()


async def test_a_verdict_does_not_depend_on_how_many_programs_run(run_python: RunPython) -> None:
    results = await asyncio.gather(*(run_python(COMPUTE, LIMITS) for _ in range(MANY)))
    assert [(one.limit, one.stdout.text) for one in results] == [(None, "1\n")] * MANY
    assert max(one.wall_s for one in results) > LIMITS.wall_s, "the machine was not busy"
    assert max(one.work_s or 0.0 for one in results) <= LIMITS.wall_s


@pytest.mark.component("cgroups")
async def test_a_cell_of_a_session_has_its_limit_whatever_others_run() -> None:
    runtime = BubblewrapRuntime()

    async def run_cell() -> ExecResult:
        session = await (await runtime.open(Template(), 600.0)).session("python")
        await session.run("import time", Limits())
        return await session.run("end = time.process_time() + 0.2\nwhile time.process_time() < end: pass", LIMITS)

    try:
        results = await asyncio.gather(*(run_cell() for _ in range(MANY)))
    finally:
        await runtime.close()
    assert [one.limit for one in results] == [None] * MANY


@pytest.mark.component("cgroups")
async def test_a_limit_is_that_of_the_time_also_where_the_template_has_half_a_processor() -> None:
    runtime = BubblewrapRuntime()
    try:
        sandbox = await runtime.open(Template(limits=Limits(cpus=0.5)), 600.0)
        command = SandboxCommand(arguments=["python3", "-I", "-S", "-c", "while True: pass"])
        one = await sandbox.run(command, Limits(wall_s=1.0))
        cell = await (await sandbox.session("python")).run("while True: pass", Limits(wall_s=1.0))
    finally:
        await runtime.close()
    assert (one.limit, cell.limit) == ("time", "time")
    assert 0.3 <= (one.usage.cpu_s or 0.0) <= 0.8


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(300)",
        "import threading\nfor _ in range(9): threading.Thread(target=exec, args=('while True: pass',)).start()",
        "import os\nwhile True:\n  if os.fork() == 0: os._exit(0)\n  os.wait()",
    ],
    ids=["computes", "sleeps", "threads", "forks"],
)
async def test_an_endless_program_ends_at_its_limit_on_a_busy_machine_too(run_python: RunPython, code: str) -> None:
    limits = Limits(wall_s=0.3, memory_bytes=1 << 30)  # without groups, the stacks of threads count as memory
    results = await asyncio.gather(*(run_python(code, limits) for _ in range(4)))
    assert [one.limit for one in results] == ["time"] * 4
    # A busy supervisor may look late; a program that starves itself would get far more.
    assert max(one.usage.cpu_s or 0.0 for one in results) <= 5 * limits.wall_s


async def test_a_grade_does_not_depend_on_how_many_submissions_run() -> None:
    runtime = BubblewrapRuntime()
    try:
        cases = [StdioCase(stdout="1")]
        graded = await asyncio.gather(*(grade(runtime, COMPUTE, cases, LIMITS) for _ in range(MANY)))
    finally:
        await runtime.close()
    assert [results[0].verdict for results in graded] == ["passed"] * MANY


async def test_a_program_that_outlasts_the_bound_on_the_whole_is_killed_and_is_a_failure_of_ours(
    run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "WHOLE_S", 0.5)
    monkeypatch.setattr(result, "WHOLE_FACTOR", 0.0)
    with pytest.raises(SandboxFailure) as caught:
        await run_python("import time; time.sleep(300)", Limits(wall_s=30.0))
    assert (caught.value.kind, caught.value.retryable) == ("program-starved", True)

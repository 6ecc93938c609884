"""The shipped suite of hostile programs, on every runtime of this machine.

Each case is a test in each column of ``conformance/expected.toml``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_sandbox.conformance import suite
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.host.cgroups.detection import NoDriver
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.registry import make_runtime, runtime_names
from tests.components import CI, PARTS
from tests.sandbox.conftest import Run


def trials() -> Iterator[object]:
    """Every case in each of its columns."""
    for column in suite.expected_table().columns:
        name = column.partition(" ")[0]
        if name not in runtime_names():
            continue
        marks = [pytest.mark.component(name)] if name in PARTS else []
        for case in suite.cases():
            if suite.expected(column, case) == ("-",):
                continue
            more = [pytest.mark.component("network-namespaces")] if case.number in ("26", "27") else []
            yield pytest.param(name, column, case, marks=[*marks, *more], id=f"{column}: {case.number} {case.title}")


@pytest.mark.parametrize(("name", "column", "case"), list(trials()))
async def test_a_case_has_the_expected_outcome(name: str, column: str, case: suite.ConformanceCase) -> None:
    runtime = make_runtime(name, allow_unsafe=True)
    try:
        found = await suite.run_case(suite.CaseContext(runtime, suite.columns(name)[column]), case)
    finally:
        await runtime.close()
    outcomes = suite.expected(column, case)
    if found.outcome == suite.NOT_RUN and found.outcome not in outcomes:
        pytest.fail(found.evidence) if CI else pytest.skip(found.evidence)
    assert found.outcome in outcomes, found.evidence


def test_the_table_has_every_case_in_every_column() -> None:
    numbers = {case.number for case in suite.cases()}
    assert {int(number.rstrip("abc")) for number in numbers} == set(range(1, 43))
    for case in suite.cases():
        for column in suite.expected_table().columns:
            assert suite.expected(column, case)


def test_the_page_on_sandboxes_shows_the_table() -> None:
    columns = suite.expected_table().columns
    rows = [
        f"| {case.number} | {case.title} | "
        + " | ".join(" or ".join(suite.expected(name, case)) for name in columns)
        + " |"
        for case in suite.cases()
    ]
    head = "| | a program that tries | " + " | ".join(f"`{name}`" for name in columns) + " |"
    shown = (Path(__file__).parents[3] / "docs" / "sandbox-cases.md").read_text().splitlines()
    assert [line for line in shown if line.startswith("| ")] == [head, "| --- " * (2 + len(columns)) + "|", *rows]


@pytest.mark.component("bubblewrap")
@pytest.mark.parametrize(
    ("outcome", "is_met"), [("contained", True), ("limit:pids", True), ("escaped", False), ("unclear", False)]
)
def test_a_runtime_without_a_column_must_be_safe_in_both_ways(outcome: str, is_met: bool) -> None:
    assert suite.columns("somebody's") == {"somebody's": "run", "somebody's code": "code"}
    assert suite.is_expected(suite.CaseOutcome(outcome=outcome), ()) is is_met


@pytest.mark.component("network-namespaces")
async def test_a_runtime_that_does_not_isolate_is_detected() -> None:
    chosen = [case for case in suite.cases() if case.number in ("18", "19a", "27")]
    leaky = make_runtime("process", allow_unsafe=True)
    for case in chosen:
        found = await suite.run_case(suite.CaseContext(leaky, "run"), case)
        assert found.outcome == suite.ESCAPED
        assert found.evidence
    await leaky.close()


@pytest.mark.component("bubblewrap")
async def test_cases_1_and_2_are_bounded_by_rlimits_without_control_groups() -> None:
    fresh, server = BubblewrapRuntime(NoDriver()), ForkServer(NoDriver())
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    memory = "held = [bytearray(10_000_000) for _ in range(1000)]"
    for code, error in ((forks, "Resource temporarily unavailable"), (memory, "MemoryError")):
        command = SandboxCommand(arguments=["/usr/bin/python3", "-I", "-c", code])
        for result in (
            await fresh.run(command, Limits(wall_s=20)),
            await server.run(PythonProgram(code=code), Limits(wall_s=20)),
        ):
            assert error in result.stderr.text
            assert result.fault == "program"
    await server.close()


@pytest.mark.component("bubblewrap")
async def test_a_cancelled_call_leaves_nothing(run: Run) -> None:
    mark = secrets.token_hex(8)
    code = f"import os\nos.execv('/bin/sleep', ['{mark}', '300'])"
    running = asyncio.ensure_future(run(code))
    async with asyncio.timeout(20):
        while not pids_with_mark(mark):
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    until = time.monotonic() + 5
    while pids_with_mark(mark) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert not pids_with_mark(mark)

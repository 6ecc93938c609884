"""Grades a submission: runs each case in a fresh sandbox, and compares the output outside.

* A sandbox has the submission and the input; the expected output never enters one.
* A verdict rests on the program's end, as observed from outside, and on its output; never on a claim of the program.
* A case cannot leave anything to the next one.
* A fault of a sandbox raises an error; it never becomes a verdict.

The guarantee for both kinds of case: a submission that passes has written the expected output. A submission may take
over its own process and the code that calls it, but the expected output is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace_sandbox.graders.cases import Case, CaseResult, StdioCase
from headrace_sandbox.graders.comparison import UnreadableAnswer, read_answer, same_text, same_value
from headrace_sandbox.guest.values import encode
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_sandbox.runtimes.shared.guest_modules import guest_text

IMPORT = "from headrace_sandbox.guest.values import"


def guest_source(name: str) -> str:
    """The source of a guest program, preceded by ``values.py``, which it needs."""
    return "\n".join(guest_text(part).replace(IMPORT, "# from above:") for part in ("values", name))


FUNCTION_CALL = guest_source("function_call")
"""The guest program that calls the function of a submission."""

SPARE_BYTES = 64 << 10
"""Bytes of output that are kept beyond the size of the expected one, for whitespace or another notation."""

DETAIL_CHARACTERS = 1000
"""Characters that a detail quotes from the end of standard error, which names the error."""


class CodeRunner(Protocol):
    """The interface of a runtime, or of a pool, that runs a submission."""

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult: ...


async def grade(
    runtime: CodeRunner,
    source: str,
    cases: Sequence[Case],
    limits: Limits,
    *,
    at_once: int = 4,
    stop_early: bool = False,
    domain: str = "",
) -> list[CaseResult]:
    """Grade a submission in Python; returns a result for each case, in order. Raises SandboxFailure.

    ``limits`` apply to each case. ``at_once``: the most cases that run at a time. ``stop_early``: start no case after
    one that did not pass; the results then end with it, or a little later. ``domain``: the program's trust domain.
    """
    source = source.encode(errors="replace").decode()
    slots = asyncio.Semaphore(at_once)
    failed = asyncio.Event()

    async def graded(case: Case) -> CaseResult | None:
        async with slots:
            if stop_early and failed.is_set():
                return None
            result = await _grade_case(runtime, source, case, limits, domain)
        if result.verdict != "passed":
            failed.set()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(graded(case)) for case in cases]
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None
    return [result for task in tasks if (result := task.result()) is not None]


async def _grade_case(runtime: CodeRunner, source: str, case: Case, limits: Limits, domain: str) -> CaseResult:
    program, expected_bytes = _program(case, source, domain)
    kept_bytes = max(limits.kept_bytes, 2 * (expected_bytes + SPARE_BYTES))
    result = await runtime.run_code(program, msgspec.structs.replace(limits, kept_bytes=kept_bytes))
    if result.fault == "limit":
        return CaseResult(verdict="limit", limit=result.limit, detail=f"limit: {result.limit}", wall_s=result.wall_s)
    if result.fault:
        return CaseResult(verdict="error", detail=_describe_failure(result), wall_s=result.wall_s)
    wrong = _mismatch(case, result)
    return CaseResult(verdict="wrong" if wrong else "passed", detail=wrong, wall_s=result.wall_s)


def _program(case: Case, source: str, domain: str) -> tuple[PythonProgram, int]:
    """The program to run, and roughly the number of bytes that it should write."""
    if isinstance(case, StdioCase):
        return PythonProgram(code=source, stdin=case.stdin.encode(), domain=domain), len(case.stdout.encode())
    request = {"source": source, "function": case.function, "arguments": encode(case.arguments)}
    expected_bytes = len(msgspec.json.encode(encode(case.expected)))
    return PythonProgram(code=FUNCTION_CALL, stdin=msgspec.json.encode(request), domain=domain), expected_bytes


def _mismatch(case: Case, result: ExecResult) -> str:
    """The difference from the expected output; empty if there is none."""
    if result.stdout.truncated:
        return f"it wrote {result.stdout.total_bytes} bytes, far more than expected"
    if isinstance(case, StdioCase):
        return "" if same_text(result.stdout.text, case.stdout) else "its output is not the expected one"
    if not result.stdout.total_bytes:
        return "it ended before the function returned"
    try:
        value = read_answer(result.stdout.head)
    except UnreadableAnswer as error:
        return f"its answer cannot be read: {error}"
    return "" if same_value(value, case.expected) else "the function did not return the expected value"


def _describe_failure(result: ExecResult) -> str:
    ended = result.lost or (f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}")
    stderr = result.stderr.text.strip()[-DETAIL_CHARACTERS:]
    return f"{ended}: {stderr}" if stderr else ended


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

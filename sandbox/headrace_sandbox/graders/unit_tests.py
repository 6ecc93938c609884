"""Grades a submission by unit tests that it never sees: test functions, and cases of ``unittest``.

* Tests run in a process of their own, beside the submission's and out of its reach; their calls of the module go to the
  submission, and data comes back. Expected values stay with the tests.
* Each test has its own process of the submission.
* Verdicts come from the tests' process alone. If a submission kills that process, the remaining tests have no verdict,
  which is an error.
* Tests that cannot be loaded, or an empty set of tests, are a failure of the environment, not of the submission.

The guarantee is that of a call (``CallCase``): a test passes only if it got the data that it expects. Objects of the
submission cannot be compared, since their own code would decide the result. Not supported: pytest fixtures and plugins,
subclasses of the submission's classes, its own exceptions by class, callbacks.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from headrace.errors import EnvironmentFailure
from headrace_sandbox.graders.cases import CaseResult
from headrace_sandbox.graders.grader import guest_source
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import SandboxCommand

PYTHON = "python3"

KEPT_BYTES = 4 << 20
"""Most bytes of verdicts that are kept; far more than tests need."""


class CommandRunner(Protocol):
    """The interface of a runtime, or of a pool, that runs the tests."""

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult: ...


async def grade_unit_tests(
    runtime: CommandRunner, source: str, tests: str, limits: Limits, *, module: str = "solution"
) -> dict[str, CaseResult]:
    """Run tests on a submission that they import as ``module``; returns a result for each test by its name.

    ``limits`` apply to all tests together. Raises EnvironmentFailure ``bad-tests``, and SandboxFailure.
    """
    request = {
        "module": module,
        "source": source.encode(errors="replace").decode(),
        "tests": tests,
        "submission": guest_source("submission"),
    }
    command = SandboxCommand(
        arguments=[PYTHON, "-I", "-c", guest_source("unit_test_runner")], stdin=msgspec.json.encode(request)
    )
    result = await runtime.run(command, msgspec.structs.replace(limits, kept_bytes=KEPT_BYTES))
    names, verdicts = _read(result)
    if not names:
        message = result.stderr.text.strip()[-1000:]
        raise EnvironmentFailure(
            f"The tests cannot be run: {message or 'no tests were defined'}",
            hint="Tests are functions whose names begin with test, or classes of unittest.TestCase.",
            kind="bad-tests",
            retryable=False,
        )
    return {name: verdicts.get(name) or _missing_verdict(result) for name in names}


def _read(result: ExecResult) -> tuple[list[str], dict[str, CaseResult]]:
    """The names of the tests, and the verdicts; the last line may be incomplete."""
    names: list[str] = []
    verdicts: dict[str, CaseResult] = {}
    for line in result.stdout.head.split(b"\n")[:-1]:
        report: dict[str, Any] = json.loads(line)
        if "tests" in report:
            names = report["tests"]
        else:
            verdicts[report["test"]] = CaseResult(verdict=report["verdict"], detail=report["detail"])
    return names, verdicts


def _missing_verdict(result: ExecResult) -> CaseResult:
    """The result of a test without a verdict."""
    if result.fault == "limit":
        return CaseResult(verdict="limit", limit=result.limit, detail=f"limit: {result.limit}")
    return CaseResult(verdict="error", detail="the process of the tests ended before it ran this one")

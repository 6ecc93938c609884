"""Grades a submission by unit tests that nobody shows it: test functions, and cases of ``unittest``.

* Tests run in a process of their own, beside the submission's and out of its reach; what they ask of the module goes
  to the submission, and data comes back. Expected values stay with the tests.
* Each test has a process of the submission of its own.
* A verdict is what the tests' process wrote. A submission that kills it leaves the tests that were to come without one:
  an error.
* Tests that cannot be loaded, or of which there are none, are a failure, not the submission's.

What is promised is what a call promises (``CallCase``): a test passes only if the data that it asked for is what it
expects. Objects of the submission are not compared, since they would decide themselves. What is not offered: pytest
with its fixtures and plugins, subclasses of the submission's classes, its own exceptions by class, callbacks.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from headrace.errors import EnvironmentFailure
from headrace_sandbox.graders.cases import CaseResult
from headrace_sandbox.graders.grader import inside
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command

PYTHON = "python3"

KEPT_BYTES = 4 << 20
"""Of the verdicts: more than any number of tests has."""


class CommandRunner(Protocol):
    """What runs the tests: a runtime, or what stands for one."""

    async def run(self, command: Command, limits: Limits) -> ExecResult: ...


async def grade_unit_tests(
    runtime: CommandRunner, source: str, tests: str, limits: Limits, *, module: str = "solution"
) -> dict[str, CaseResult]:
    """Run tests on a submission that they import as ``module``; gives a result for each test by its name.

    ``limits`` are those of all tests together. Raises EnvironmentFailure ``bad-tests``, and SandboxFailure.
    """
    request = {
        "module": module,
        "source": source.encode(errors="replace").decode(),
        "tests": tests,
        "submission": inside("submission.py"),
    }
    command = Command(arguments=[PYTHON, "-I", "-c", inside("unit_test_runner.py")], stdin=msgspec.json.encode(request))
    result = await runtime.run(command, msgspec.structs.replace(limits, kept_bytes=KEPT_BYTES))
    names, verdicts = _read(result)
    if not names:
        said = result.stderr.text.strip()[-1000:]
        raise EnvironmentFailure(
            f"The tests cannot be run: {said or 'there are none'}",
            hint="Tests are functions whose names begin with test, or classes of unittest.TestCase.",
            kind="bad-tests",
            retryable=False,
        )
    return {name: verdicts.get(name) or _without(result) for name in names}


def _read(result: ExecResult) -> tuple[list[str], dict[str, CaseResult]]:
    """What there is to run, and the verdicts that were written; the last line may be cut short."""
    names: list[str] = []
    verdicts: dict[str, CaseResult] = {}
    for line in result.stdout.head.split(b"\n")[:-1]:
        said: dict[str, Any] = json.loads(line)
        if "tests" in said:
            names = said["tests"]
        else:
            verdicts[said["test"]] = CaseResult(verdict=said["verdict"], detail=said["detail"])
    return names, verdicts


def _without(result: ExecResult) -> CaseResult:
    """A test that has no verdict."""
    if result.fault == "limit":
        return CaseResult(verdict="limit", limit=result.limit, detail=f"limit: {result.limit}")
    return CaseResult(verdict="error", detail="the process of the tests was ended before it came to this one")

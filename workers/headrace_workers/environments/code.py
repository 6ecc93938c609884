"""Programming problems: the answer is a Python program, graded by tests in sandboxes.

* The answer is the last fenced block of code; without one the episode ends with a format error.
* Passing all tests earns 1, anything less 0; with ``partial`` the reward is the share of tests that passed.
* Expected outputs never enter a sandbox, so an answer can pass only by producing them.
* An answer that raises or exceeds a limit earns nothing; a fault of the sandbox ends the attempt as a failure.
* The seed selects the row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.environment import Step
from headrace.errors import InvalidRequest
from headrace_sandbox.graders import Case, CaseResult, grade
from headrace_sandbox.result import Limits
from headrace_workers.environment_context import LOCAL_CONTEXT, EnvironmentContext
from headrace_workers.environments.answers import FORMAT_ERROR, last_block
from headrace_workers.environments.call_order import out_of_order_error
from headrace_workers.environments.case_rows import read_cases
from headrace_workers.environments.rows import question_of, read_row
from headrace_workers.unicode_text import as_unicode

BASICS = Path(__file__).parent / "data" / "code_basics.jsonl"
"""Twenty small built-in problems."""

HOW_TO_ANSWER = (
    "Answer with one block of Python code:\n```python\n# your code\n```\nIt is run by itself, without a network."
)


class CodeProblems:
    """Problems from a file with one JSON row per line (``path``), or from one row (``example``).

    A row has a text under ``problem``, and ``tests``. ``max_tests`` keeps the tests with the longest inputs.
    ``time_s`` and ``memory_mib`` limit each test.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        example: dict[str, Any] | None = None,
        max_tests: int = 12,
        partial: bool = False,
        time_s: float = 5.0,
        memory_mib: int = 256,
    ) -> None:
        if (path is None) == (example is None):
            raise InvalidRequest("Give either `path`, a file of rows, or `example`, one row.")
        self.environment_context: EnvironmentContext = LOCAL_CONTEXT
        self._path = path
        self._example = example
        self._max_tests = max_tests
        self._partial = partial
        self._limits = Limits(wall_s=time_s, memory_bytes=memory_mib << 20)
        self._tests: list[Case] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Select a row and ask its question."""
        row = self._example if self._path is None else read_row(self._path, seed)
        assert row is not None
        self._tests = read_cases(row, self._max_tests)
        return f"{question_of(row)}\n\n{HOW_TO_ANSWER}", {"id": str(row.get("id", "")), "tests": len(self._tests)}

    async def step(self, action: str) -> Step:
        """Grade the answer; the episode ends."""
        if not self._tests:
            raise out_of_order_error(self)
        tests, self._tests = self._tests, []
        source = last_block(action)
        if source is None:
            return _end("No block of code was found.", {"outcome": "format_error"}, "format_error", FORMAT_ERROR)
        results = await grade(
            self.environment_context.sandbox, as_unicode(source), tests, self._limits, stop_early=not self._partial
        )
        return self._result_step(results, len(tests))

    def _result_step(self, results: list[CaseResult], count: int) -> Step:
        passed = sum(result.verdict == "passed" for result in results)
        reward = passed / count if self._partial else float(passed == count)
        failed = next((result for result in results if result.verdict != "passed"), None)
        info = {
            "outcome": "passed" if failed is None else failed.verdict,
            "verdicts": [result.verdict for result in results],
            "passed": passed,
            "detail": "" if failed is None else failed.detail,
        }
        observation = "All tests passed." if failed is None else f"Not all tests passed ({failed.verdict})."
        return _end(observation, info, "tests", reward)


def basics(**kwargs: Any) -> CodeProblems:
    """Make the environment of the built-in problems."""
    return CodeProblems(str(BASICS), **kwargs)


def _end(observation: str, info: dict[str, Any], part: str, reward: float) -> Step:
    return Step(observation, reward, True, False, {**info, "reward_parts": {part: reward}})

r"""Mathematical problems: one question, one answer in ``\boxed{...}``, graded exactly.

* Whole numbers, fractions and decimals are compared exactly; other expressions by ``math-verify``, in a separate
  process with a deadline and a memory limit.
* An answer that exhausts the grader earns ``exhausted_reward``, under its own name in ``reward_parts``.
* A reference that exhausts the grader or cannot be parsed is a failure of the environment, before the first turn.
* A correct answer earns 1, any other 0; an action without a box ends the episode with a format error.
* The seed selects the row.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.environment import Step
from headrace.errors import EnvironmentFailure, InvalidRequest, MissingExtra
from headrace_workers.bounded_calls import LimitExceeded
from headrace_workers.environment_context import LOCAL_CONTEXT, EnvironmentContext
from headrace_workers.environments.answers import FORMAT_ERROR, final_step, last_boxed
from headrace_workers.environments.arithmetic import read_number
from headrace_workers.environments.call_order import out_of_order_error
from headrace_workers.environments.rows import bad_row_error, question_of, read_row

BASICS = Path(__file__).parent / "data" / "math_basics.jsonl"
"""Twenty small built-in problems."""

GRADER_MODULE = "headrace_workers.environments.math_equality"

_usable_references: set[str] = set()
"""References that the grader has accepted in this process."""

MAX_USABLE_REFERENCES = 100_000

LONG_ACTION_CHARS = 20_000
"""Length of an action, in characters, from which it is parsed on a thread: it takes milliseconds."""


class MathProblems:
    """Problems from a file with one JSON row per line (``path``), or from one row (``example``).

    A row has a text under ``problem``, and ``answer``. ``grader_s`` and ``grader_mib`` limit the grading of an answer.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        example: dict[str, Any] | None = None,
        grader_s: float = 5.0,
        grader_mib: int = 512,
        exhausted_reward: float = 0.0,
    ) -> None:
        if (path is None) == (example is None):
            raise InvalidRequest("Give either `path`, a file of rows, or `example`, one row.")
        if find_spec("math_verify") is None:
            raise MissingExtra(
                "Mathematical problems need math-verify, which is not installed.",
                hint="pip install 'headrace[math]' where the workers run.",
            )
        self.environment_context: EnvironmentContext = LOCAL_CONTEXT
        self._path = path
        self._example = example
        self._bounds: dict[str, Any] = {"time_s": grader_s, "memory_bytes": grader_mib << 20}
        self._exhausted_reward = exhausted_reward
        self._reference: str | None = None

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Select a row, check that its reference can be graded, and ask its question."""
        path = self._path
        row = self._example if path is None else await self.environment_context.call(read_row, path, seed)
        assert row is not None
        question = question_of(row)
        if "answer" not in row:
            raise bad_row_error("The row has no answer.")
        self._reference = reference_of(row["answer"])
        await self._check(self._reference)
        prompt = f"{question}\n\nWrite your final answer like this: \\boxed{{answer}}"
        return prompt, {"id": str(row.get("id", "")), "reference": self._reference}

    async def step(self, action: str) -> Step:
        """Grade the answer; the episode ends."""
        if self._reference is None:
            raise out_of_order_error(self)
        reference, self._reference = self._reference, None
        answer = (
            last_boxed(action)
            if len(action) < LONG_ACTION_CHARS
            else await self.environment_context.call(last_boxed, action)
        )
        if answer is None:
            return final_step("No answer in the form \\boxed{answer} was found.", "format_error", FORMAT_ERROR)
        try:
            is_right = await self._is_right(answer, reference)
        except LimitExceeded as exhausted:
            observation = f"The answer could not be graded: it exhausted the grader ({exhausted})."
            return final_step(observation, "grader_exhausted", self._exhausted_reward)
        return final_step("Right.", "right", 1.0) if is_right else final_step("Wrong.", "wrong", 0.0)

    async def _is_right(self, answer: str, reference: str) -> bool:
        if answer == reference:
            return True
        numbers = read_number(answer), read_number(reference)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return bool(
            await self.environment_context.bounded(f"{GRADER_MODULE}:is_equal", answer, reference, **self._bounds)
        )

    async def _check(self, reference: str) -> None:
        """Check that the grader accepts a reference. Raises EnvironmentFailure ``bad-reference``."""
        if read_number(reference) is not None or reference in _usable_references:
            return
        try:
            is_readable = await self.environment_context.bounded(
                f"{GRADER_MODULE}:is_readable", reference, **self._bounds
            )
        except LimitExceeded as exhausted:
            raise _bad_reference(f"exhausts the grader ({exhausted})", reference, retryable=True) from exhausted
        if not is_readable:
            raise _bad_reference("cannot be parsed", reference, retryable=False)
        if len(_usable_references) < MAX_USABLE_REFERENCES:
            _usable_references.add(reference)


def basics(**kwargs: Any) -> MathProblems:
    """Make the environment of the built-in problems."""
    return MathProblems(str(BASICS), **kwargs)


def reference_of(answer: Any) -> str:
    """Expression of a row's answer: the content of its last box if it has one, without dollar signs."""
    text = str(answer).strip()
    boxed = last_boxed(text)
    return text.strip("$").strip() if boxed is None else boxed


def _bad_reference(why: str, reference: str, *, retryable: bool) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"The row's answer {why}: {reference[:200]!r}.",
        hint="Fix the row; it cannot grade a policy's answer.",
        kind="bad-reference",
        retryable=retryable,
    )

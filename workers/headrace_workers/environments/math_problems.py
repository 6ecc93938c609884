r"""Mathematical problems: one question, one answer in ``\boxed{...}``, graded exactly.

* Whole numbers, fractions and decimals are compared exactly; everything else by ``math-verify``, in a process of its
  own with a deadline and a bound of memory.
* An answer that exhausts the grader earns ``exhausted_reward``, and its ``reward_parts`` say so.
* A reference that exhausts the grader, or that it cannot read, is a failure of the environment, before anything is
  sampled.
* A right answer earns 1, any other 0, one without a box ends the episode at a format error.
* The seed chooses the row.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.environment import Step
from headrace.errors import EnvironmentFailure, InvalidRequest, MissingExtra
from headrace_workers.bounded_calls import Exhausted
from headrace_workers.environment_context import LOCAL_CONTEXT, EnvironmentContext
from headrace_workers.environments.answers import FORMAT_ERROR, last_boxed
from headrace_workers.environments.arithmetic import read_number
from headrace_workers.environments.call_order import out_of_order
from headrace_workers.environments.rows import bad_row, row_of

BASICS = Path(__file__).parent / "data" / "math_basics.jsonl"
"""Twenty small problems of our own."""

JUDGE = "headrace_workers.environments.math_equality"

QUESTION_KEYS = ("problem", "question", "prompt")

_checked: set[str] = set()
"""References that were seen to be usable."""

MOST_CHECKED = 100_000

LONG = 20_000
"""Characters of an action that takes milliseconds to read, and so is read on a thread."""


class MathProblems:
    """Problems of a file with one row a line (``path``), or one row (``example``): a text under ``problem``, and
    ``answer``. ``grader_s``, ``grader_mib``: what the grader may take for one answer."""

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
            raise InvalidRequest("Give `path`, a file of rows, or `example`, one row.")
        if find_spec("math_verify") is None:
            raise MissingExtra(
                "Mathematical problems are graded by math-verify, which is not installed.",
                hint="pip install 'headrace[math]' where the workers run.",
            )
        self.environment_context: EnvironmentContext = LOCAL_CONTEXT
        self._path = path
        self._example = example
        self._bounds: dict[str, Any] = {"time_s": grader_s, "memory_bytes": grader_mib << 20}
        self._exhausted_reward = exhausted_reward
        self._reference: str | None = None

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Choose a row, see that its answer can be graded, and ask its question."""
        path = self._path
        row = self._example if path is None else await self.environment_context.call(row_of, path, seed)
        assert row is not None
        question = next((row[key] for key in QUESTION_KEYS if isinstance(row.get(key), str)), None)
        if question is None or "answer" not in row:
            raise bad_row(f"The row has no text under {', '.join(QUESTION_KEYS)}, or no answer.")
        self._reference = reference_of(row["answer"])
        await self._check(self._reference)
        asked = f"{question}\n\nWrite your final answer like this: \\boxed{{answer}}"
        return asked, {"id": str(row.get("id", "")), "reference": self._reference}

    async def step(self, action: str) -> Step:
        """Grade the answer; the episode ends."""
        if self._reference is None:
            raise out_of_order(self)
        reference, self._reference = self._reference, None
        answer = last_boxed(action) if len(action) < LONG else await self.environment_context.call(last_boxed, action)
        if answer is None:
            return _end("No answer in the form \\boxed{answer} was found.", "format_error", FORMAT_ERROR)
        try:
            is_right = await self._is_right(answer, reference)
        except Exhausted as exhausted:
            said = f"The answer could not be graded: it exhausted the grader ({exhausted})."
            return _end(said, "grader_exhausted", self._exhausted_reward)
        return _end("Right.", "right", 1.0) if is_right else _end("Wrong.", "wrong", 0.0)

    async def _is_right(self, answer: str, reference: str) -> bool:
        if answer == reference:
            return True
        numbers = read_number(answer), read_number(reference)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return bool(await self.environment_context.bounded(f"{JUDGE}:same", answer, reference, **self._bounds))

    async def _check(self, reference: str) -> None:
        """Raises EnvironmentFailure ``bad-reference``."""
        if read_number(reference) is not None or reference in _checked:
            return
        try:
            is_readable = await self.environment_context.bounded(f"{JUDGE}:readable", reference, **self._bounds)
        except Exhausted as exhausted:
            raise _bad_reference(f"exhausts the grader ({exhausted})", reference, retryable=True) from exhausted
        if not is_readable:
            raise _bad_reference("cannot be read", reference, retryable=False)
        if len(_checked) < MOST_CHECKED:
            _checked.add(reference)


def basics(**kwargs: Any) -> MathProblems:
    """The problems that come with Headrace."""
    return MathProblems(str(BASICS), **kwargs)


def reference_of(answer: Any) -> str:
    """The expression of a row's answer: the content of its last box if it has one, without dollar signs."""
    text = str(answer).strip()
    boxed = last_boxed(text)
    return text.strip("$").strip() if boxed is None else boxed


def _bad_reference(why: str, reference: str, *, retryable: bool) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"The answer that the row gives {why}: {reference[:200]!r}.",
        hint="Mend the row; no policy can be graded by it.",
        kind="bad-reference",
        retryable=retryable,
    )


def _end(observation: str, outcome: str, reward: float) -> Step:
    return Step(observation, reward, True, False, {"outcome": outcome, "reward_parts": {outcome: reward}})

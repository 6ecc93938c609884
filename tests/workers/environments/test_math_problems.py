"""Mathematical problems, graded exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.errors import InvalidRequest, MissingExtra
from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.environments import math_problems
from headrace_workers.environments.math_problems import BASICS, MathProblems, basics, reference_of
from tests.workers.bounded_calls.test_grading_limits import context_of
from tests.workers.fakes import Script, failure_of, play, say

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graders() -> AsyncIterator[BoundedCalls]:
    made = BoundedCalls()
    await made.call("headrace_workers.environments.math_equality:is_equal", "1", "1", time_s=60, memory_bytes=1 << 30)
    yield made
    await made.close()


async def reward(graders: BoundedCalls, answer: str, reference: Any) -> float:
    environment = MathProblems(example={"question": "?", "answer": reference}, grader_s=30.0)
    environment.environment_context = context_of(graders)
    await environment.reset(0)
    return (await environment.step(f"So it is \\boxed{{{answer}}}.")).reward


@pytest.mark.parametrize(
    ("answer", "reference", "earned"),
    [
        ("0.75", r"\frac{3}{4}", 1.0),
        ("0.333333333", r"\frac13", 0.0),
        ("1/3", r"$\frac{1}{3}$", 1.0),
        ("12", 12, 1.0),
        ("12.0", 12, 1.0),
        ("12.0000001", 12, 0.0),
        (r"3\sqrt{2}", r"\sqrt{18}", 1.0),
        (r"\{3, 2\}", r"\{2, 3\}", 1.0),
        ("x^2 - 9", "(x-3)(x+3)", 1.0),
        ("(4, 3)", "(3, 4)", 0.0),
        ("", "12", 0.0),
        (r"\frac{", "12", 0.0),
        ("yes", "yes", 1.0),
    ],
)
async def test_answers_are_compared_exactly(graders: BoundedCalls, answer: str, reference: Any, earned: float) -> None:
    if answer.count("{") > answer.count("}"):
        answer += "}"
    assert await reward(graders, answer, reference) == earned


async def test_every_built_in_problem_accepts_its_answer_and_rejects_another(graders: BoundedCalls) -> None:
    rows = [json.loads(line) for line in BASICS.read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    right = await asyncio.gather(*(reward(graders, answer, answer) for answer in answers))
    wrong = await asyncio.gather(*(reward(graders, r"\frac{17}{1000}", answer) for answer in answers))
    assert [row["id"] for row, good, bad in zip(rows, right, wrong, strict=True) if (good, bad) != (1.0, 0.0)] == []


async def test_plain_numbers_need_no_grader() -> None:
    assert await reward(BoundedCalls(), "0.5", r"\frac{1}{2}") == 1.0


async def test_an_answer_without_a_box_is_a_format_error(graders: BoundedCalls) -> None:
    record = await play(Script(say("42")), lambda: MathProblems(example={"question": "?", "answer": 42}))
    (turn,) = record.segments[0].turns
    assert (turn.reward, turn.reward_parts) == (-0.1, {"format_error": -0.1})


@pytest.mark.parametrize("row", [{}, {"question": "?"}, {"answer": 1}])
async def test_a_row_without_question_or_answer_is_a_failure(row: dict[str, Any]) -> None:
    record = await play(Script(say("x")), lambda: MathProblems(example=row))
    assert failure_of(record) == ("environment", "bad-row", False)


@pytest.mark.parametrize(
    ("given", "reference"),
    [(12, "12"), (" $x+1$ ", "x+1"), (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (0.5, "0.5")],
)
async def test_the_reference_is_the_expression_in_a_rows_answer(given: Any, reference: str) -> None:
    assert reference_of(given) == reference


async def test_rows_come_from_a_file_or_from_one_example() -> None:
    with pytest.raises(InvalidRequest):
        MathProblems()


async def test_without_the_extra_the_hint_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_problems, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"headrace\[math\]"):
        basics()

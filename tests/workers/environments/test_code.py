"""Programming problems, and the tests read from rows of a data set."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace_sandbox.graders import CallCase, StdioCase, grade
from headrace_sandbox.result import Limits
from headrace_workers.environments import math_problems
from headrace_workers.environments.case_rows import read_cases as cases_of
from headrace_workers.environments.code import BASICS, CodeProblems, basics
from headrace_workers.environments.conformance import check_environment
from headrace_workers.environments.rows import read_row
from headrace_workers.sandboxes import WorkerSandbox
from tests.workers.fakes import Script, failure_of, play, say
from tests.workers.runtimes import LOST, ScriptedRuntime, bubblewrap, result, sandbox_of

SQUARES: dict[str, Any] = {
    "id": "squares",
    "problem": "Print the square of each number of the input.",
    "tests": {"inputs": ["2\n", "3 4\n", "5\n"], "outputs": ["4\n", "9\n16\n", "25\n"]},
}

RIGHT = "Like this:\n```python\nfor n in input().split():\n    print(int(n) ** 2)\n```\nDone."

SOLUTIONS = json.loads((Path(__file__).parent / "code_basics_solutions.json").read_text())


@pytest.fixture
async def sandbox() -> AsyncIterator[WorkerSandbox]:
    made = bubblewrap()
    yield made
    await made.close()


def rows() -> Iterator[dict[str, Any]]:
    for line in BASICS.read_text().splitlines():
        yield json.loads(line)


async def graded(sandbox: WorkerSandbox, action: str, **kwargs: Any) -> tuple[float, dict[str, Any]]:
    """Reward of an action, and the info of its step."""
    record = await play(Script(say(action)), lambda: CodeProblems(**{"example": SQUARES, **kwargs}), sandbox=sandbox)
    assert record.status == "finished", record.failure
    (turn,) = record.segments[0].turns
    assert sum(turn.reward_parts.values()) == turn.reward
    return turn.reward, record.infos[-1]


@pytest.mark.component("bubblewrap")
async def test_passing_all_tests_earns_1_anything_less_0(sandbox: WorkerSandbox) -> None:
    reward, info = await graded(sandbox, RIGHT)
    assert (reward, info["outcome"], info["verdicts"]) == (1.0, "passed", ["passed"] * 3)
    reward, info = await graded(sandbox, "```python\nprint(int(input()) ** 2)\n```")
    assert (reward, info["outcome"], info["passed"]) == (0.0, "error", 2)


@pytest.mark.component("bubblewrap")
async def test_with_partial_the_reward_is_the_share_of_tests_that_passed(sandbox: WorkerSandbox) -> None:
    reward, info = await graded(sandbox, "```\nprint(int(input().split()[0]) ** 2)\n```", partial=True)
    assert (reward, info["verdicts"]) == (2 / 3, ["passed", "wrong", "passed"])


@pytest.mark.component("bubblewrap")
async def test_an_answer_that_exceeds_a_limit_earns_nothing(sandbox: WorkerSandbox) -> None:
    reward, info = await graded(sandbox, "```python\nwhile True: pass\n```", time_s=0.3)
    assert (reward, info["outcome"], info["detail"]) == (0.0, "limit", "limit: time")


async def test_an_action_without_a_block_is_a_format_error() -> None:
    runtime = ScriptedRuntime(result())
    for action in ("print(4)", "```python\nprint(4)", "```print(4)```", ""):
        reward, info = await graded(sandbox_of(runtime), action)
        assert (reward, info["outcome"]) == (-0.1, "format_error")
    assert runtime.programs == []


async def test_a_fault_of_the_sandbox_is_a_failure_and_not_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_workers.sandboxes.PAUSE_S", 0.0)
    record = await play(
        Script(say(RIGHT)), lambda: CodeProblems(example=SQUARES), sandbox=sandbox_of(ScriptedRuntime(LOST))
    )
    assert failure_of(record) == ("sandbox", "sandbox-lost", True)
    assert record.segments == []


@pytest.mark.component("bubblewrap")
async def test_the_built_in_problems_can_be_solved_but_not_by_an_empty_program(sandbox: WorkerSandbox) -> None:
    runtime = await sandbox.runtime()
    for row in rows():
        cases = cases_of(row, 12)
        results = await grade(runtime, SOLUTIONS[row["id"]], cases, Limits())
        assert [(row["id"], result.verdict) for result in results] == [(row["id"], "passed")] * len(cases)
        (first, *_) = await grade(runtime, "pass", cases, Limits(), at_once=1, stop_early=True)
        assert first.verdict in ("wrong", "error"), row["id"]


@pytest.mark.component("bubblewrap")
def test_code_problems_keep_the_protocol() -> None:
    problems = check_environment(lambda: basics(time_s=2.0), actions=["```python\nprint(1)\n```", "no"], seeds=(0, 1))
    assert problems == []


def test_math_problems_keep_the_protocol() -> None:
    assert check_environment(math_problems.basics, actions=[r"\boxed{42}", "no"], seeds=(0,)) == []


# Rows ------------------------------------------------------------------------------------------------------------


def test_the_seed_selects_the_row(tmp_path: Path) -> None:
    drawn = [read_row(BASICS, seed)["id"] for seed in range(200)]
    assert drawn == [read_row(BASICS, seed)["id"] for seed in range(200)]
    assert set(drawn) == {row["id"] for row in rows()}


def test_a_changed_file_is_indexed_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n\n')
    assert read_row(path, 0) == {"id": "a"}
    path.write_text('\n{"id": "bcd"}')
    assert read_row(path, 0) == {"id": "bcd"}


@pytest.mark.parametrize(
    ("content", "kind"), [(None, "no-rows"), ("\n\n", "no-rows"), ("[1]\n", "bad-row"), ("{\n", "bad-row")]
)
def test_a_file_without_usable_rows_is_a_failure_that_names_it(tmp_path: Path, content: str | None, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EnvironmentFailure, match=r"rows\.jsonl") as caught:
        read_row(path, 0)
    assert (caught.value.kind, caught.value.retryable) == (kind, False)


PAIRS = {"inputs": ["1", "22"], "outputs": ["a", "b"]}


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        (PAIRS, [StdioCase(stdin="1", stdout="a"), StdioCase(stdin="22", stdout="b")]),
        (json.dumps(PAIRS), [StdioCase(stdin="1", stdout="a"), StdioCase(stdin="22", stdout="b")]),
        ([{"input": "1", "output": "a", "type": "stdin_stdout"}], [StdioCase(stdin="1", stdout="a")]),
        ([{"input": ["1", "2"], "output": ["a", "b"]}], [StdioCase(stdin="1\n2", stdout="a\nb")]),
        (
            {"fn_name": "f", "inputs": [[1, "x"]], "outputs": ["3"]},
            [CallCase(function="f", arguments=[1, "x"], expected="3")],
        ),
        (
            [{"fn_name": "f", "input": '[1, 2]\n"x"', "output": "3"}],
            [CallCase(function="f", arguments=[[1, 2], "x"], expected=3)],
        ),
    ],
)
def test_tests_are_read_in_the_formats_of_common_data_sets(tests: Any, cases: list[Any]) -> None:
    assert cases_of({"tests": tests}, 12) == cases


def test_the_tests_with_the_longest_inputs_are_used_in_their_order() -> None:
    inputs = ["1", "333", "22", "4444", "5"]
    cases = cases_of({"tests": {"inputs": inputs, "outputs": inputs}}, 3)
    assert [case.stdin for case in cases if isinstance(case, StdioCase)] == ["333", "22", "4444"]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"tests": "{"},
        {"tests": []},
        {"tests": {"inputs": ["1"], "outputs": []}},
        {"tests": [{"input": "1"}]},
        {"tests": {"fn_name": "f", "inputs": [3], "outputs": [3]}},
        {"tests": 3},
    ],
)
def test_tests_that_cannot_be_read_are_a_failure_of_the_row(row: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        cases_of(row, 12)
    assert (caught.value.kind, caught.value.retryable) == ("bad-row", False)


async def test_a_row_without_a_question_fails_the_episode() -> None:
    record = await play(Script(say("x")), lambda: CodeProblems(example={"tests": PAIRS}))
    assert failure_of(record) == ("environment", "bad-row", False)


def test_rows_come_from_a_file_or_from_one_example() -> None:
    for kwargs in ({}, {"path": "x", "example": {}}):
        with pytest.raises(InvalidRequest):
            CodeProblems(**kwargs)

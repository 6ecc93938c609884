"""Python tool for any environment."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import headrace
from headrace import environment as registry
from headrace.environment import Step
from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace.trajectory import ContentPart, Task, Trajectory
from headrace_workers.environments.conformance import check_environment
from headrace_workers.environments.python_tool import LAST_CALL, PythonTool
from headrace_workers.sandboxes import WorkerSandbox
from tests.workers.fakes import Script, assignment, failure_of, play, say
from tests.workers.runtimes import LOST, ScriptedRuntime, bubblewrap, result, sandbox_of

SUM = "math:Arithmetic-v0"


@pytest.fixture
async def sandbox() -> AsyncIterator[WorkerSandbox]:
    made = bubblewrap()
    yield made
    await made.close()


async def played(*said: str, sandbox: WorkerSandbox, environment: str = SUM, **python: Any) -> Trajectory:
    return await play(
        Script(*(say(text) for text in said)), lambda: PythonTool(environment, python=python), sandbox=sandbox
    )


def observations(record: Trajectory) -> list[str]:
    """Return the observations after the first one."""
    return [str(message.content) for message in record.messages[2:] if message.role == "user"]


@pytest.mark.component("bubblewrap")
async def test_a_program_runs_its_output_is_the_observation_and_the_answer_is_graded(sandbox: WorkerSandbox) -> None:
    record = await played(
        "Let me see. <python>print(6 * 7)</python> and so on",
        "```python\nprint('from a block')\n```",
        r"\boxed{no number}",
        sandbox=sandbox,
        reward=0.05,
        success_reward=0.25,
    )
    assert record.status == "finished"
    first, second, last = record.segments[0].turns
    assert (first.reward, first.reward_parts) == (0.3, {"python": 0.05, "python_success": 0.25})
    assert (last.reward, last.tool_calls, last.terminated) == (0.0, [], True)
    assert observations(record)[:2] == ["Code execution result: 42\n", "Code execution result: from a block\n"]
    (call,) = first.tool_calls
    assert (call.name, call.arguments, call.error) == ("python", {"code": "print(6 * 7)"}, "")
    assert call.result == observations(record)[0]
    assert 0 < call.duration_s < 10
    assert second.tool_calls[0].arguments == {"code": "print('from a block')\n"}
    assert "write a program between <python> and </python>" in str(record.messages[0].content)
    assert [info.get("python_uses") for info in record.infos] == [None, 1, 2, None]


@pytest.mark.component("bubblewrap")
async def test_an_exception_or_an_exceeded_limit_is_an_observation(sandbox: WorkerSandbox) -> None:
    programs = [
        "print('before')\n1 / 0",
        "while True: pass",
        "import os; os.kill(os.getpid(), 11)",
        "import sys; sys.exit(3)",
        "print('x' * 100_000)",
        "def f(: pass",
    ]
    record = await played(
        *(f"<python>{program}</python>" for program in programs),
        "stop",
        sandbox=sandbox,
        max_uses=9,
        time_s=3.0,
        output_bytes=200,
        error_reward=-0.5,
    )
    assert record.status == "finished"
    shown = observations(record)
    assert shown[0].startswith("Code execution result: before\nTraceback")
    assert shown[0].endswith("ZeroDivisionError: division by zero\n")
    assert shown[1] == "Code execution result: [The program was stopped: limit of time]\n"
    assert "signal 11" in shown[2]
    assert shown[3] == "Code execution result: \n"
    assert "bytes left out" in shown[4]
    assert len(shown[4]) < 400
    assert "SyntaxError" in shown[5]
    turns = record.segments[0].turns
    assert [turn.reward for turn in turns] == [-0.5, -0.5, -0.5, -0.5, 0.0, -0.5, -0.1]
    assert [turn.tool_calls[0].error for turn in turns[:6]] == [
        "exit code 1",
        "limit of time",
        "signal 11",
        "exit code 3",
        "",
        "exit code 1",
    ]


async def test_a_fault_of_the_sandbox_is_retried_and_is_never_an_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_workers.sandboxes.PAUSE_S", 0.0)
    call = "<python>print(1)</python>"
    record = await played(call, "x", sandbox=sandbox_of(ScriptedRuntime(LOST, result("1\n"))))
    assert (record.status, observations(record)[0]) == ("finished", "Code execution result: 1\n")
    record = await played(call, "x", sandbox=sandbox_of(ScriptedRuntime(LOST)))
    assert failure_of(record) == ("sandbox", "sandbox-lost", True)
    assert (record.segments, observations(record)) == ([], [])


async def test_a_program_that_destroys_its_sandbox_gets_an_observation() -> None:
    runtime = ScriptedRuntime(result("x", exit_code=None, lost="it killed all its processes"))
    record = await played("<python>x</python>", "x", sandbox=sandbox_of(runtime))
    assert "[The program was stopped: it killed all its processes]" in observations(record)[0]


async def test_the_number_of_calls_is_limited_and_then_every_action_goes_to_the_environment() -> None:
    runtime = ScriptedRuntime(result("1\n"))
    call = r"<python>print(1)</python> \boxed{x}"
    record = await played(call, call, call, sandbox=sandbox_of(runtime), max_uses=2)
    assert record.status == "finished"
    assert len(runtime.programs) == 2
    assert [text.endswith(LAST_CALL) for text in observations(record)] == [False, True, False]


@pytest.mark.parametrize(
    ("action", "fences", "program"),
    [
        ("<python>a</python>", True, "a"),
        ("<python>a</python> <python>b</python>", True, "a"),
        ("```python\nb\n```\n<python>a</python>", True, "b\n"),
        ("<python>a</python>\n```python\nb\n```", True, "a"),
        ("```py\nb\n```", True, "b\n"),
        ("```\nb\n```\n```python\nc\n```", True, "c\n"),
        ("```python\nb\n```", False, None),
        ("```python\nb\n``` <python>a</python>", False, "a"),
        ("<python>a", True, None),
        ("</python><python>", True, None),
        ("```python\nb", True, None),
        ("b", True, None),
        ("<python></python>", True, ""),
    ],
)
async def test_the_call_is_the_one_that_ends_first(action: str, fences: bool, program: str | None) -> None:
    runtime = ScriptedRuntime(result())
    await played(action, "x", sandbox=sandbox_of(runtime), fences=fences)
    assert [ran.code for ran in runtime.programs] == ([] if program is None else [program])


async def test_very_long_actions_are_parsed() -> None:
    runtime = ScriptedRuntime(result())
    for action in ("<python>" * 100_000, "```x\n" * 100_000, "```python\n" * 50_000 + "```" * 50_000):
        await played(action, "x", sandbox=sandbox_of(runtime))


async def test_the_environment_runs_as_it_would_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    calls: list[tuple[str, bool]] = []
    loop = threading.get_ident()

    class Inner:
        version = "7"

        def __init__(self, size: int) -> None:
            self.size = size

        def reset(self, seed: int | None = None) -> Any:
            calls.append(("reset", threading.get_ident() == loop))
            return [ContentPart(type="text", text=f"size {self.size} seed {seed}")], {}

        def step(self, action: str) -> Any:
            calls.append((action, threading.get_ident() == loop))
            return Step("", 1.0, True, False, {"mine": 1})

        async def close(self) -> None:
            calls.append(("close", threading.get_ident() == loop))

    headrace.register("test:Inner", Inner)
    runtime = ScriptedRuntime(result("1\n"))
    task = Task(environment="python:test:Inner", seed=5, kwargs={"size": 3})
    record = await play(
        Script(say("<python>1</python>"), say("answer")),
        lambda **kwargs: headrace.make("python:test:Inner", **kwargs),
        asked=assignment(task=task),
        sandbox=sandbox_of(runtime),
    )
    assert record.status == "finished"
    assert calls == [("reset", False), ("answer", False)], "on a thread, and without the call"
    first = record.messages[0].content
    assert next(part.text for part in first if isinstance(part, ContentPart)) == "size 3 seed 5"
    assert record.infos[-1] == {"mine": 1}
    assert record.provenance.environment_version == "7"
    tool = PythonTool("test:Inner", size=1)
    await tool.close()
    assert calls[-1] == ("close", True)


def test_an_unknown_setting_is_refused_with_the_list_of_settings() -> None:
    with pytest.raises(InvalidRequest, match="max_uses"):
        PythonTool(SUM, python={"uses": 3})


def test_an_environment_with_several_agents_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="several agents"):
        PythonTool("game:Nim-v0")


@pytest.mark.component("bubblewrap")
def test_an_environment_with_the_tool_keeps_the_protocol() -> None:
    actions = ["<python>print(1)</python>", r"\boxed{1}", "hm"]
    assert check_environment(lambda: headrace.make(f"python:{SUM}"), actions=actions, seeds=(0,)) == []

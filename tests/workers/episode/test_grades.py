"""Grades of episodes that a limit of the run ends."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import pytest

import headrace
from headrace.errors import PolicyFailure
from headrace.trajectory import Task, Trajectory
from headrace_workers.environments.python_tool import PythonTool
from headrace_workers.episode import EnvironmentProcesses, EpisodeRun
from tests.workers.episode.test_multi_agent import Table, move, rewards_of
from tests.workers.fakes import Clock, OneTurn, Script, Turns, assignment, failure_of, plan, play, say, tools

LONG = PolicyFailure("too long", kind="context-overflow", retryable=False)


class Graded(Turns):
    """Turns without rewards; the state reached has the grade ``worth``, or what it returns or raises."""

    def __init__(self, worth: Any = 1.0, last: int = 9, **turns: Any) -> None:
        super().__init__(last, **turns)
        self.worth, self.asked = worth, 0

    def step(self, action: str) -> Any:
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest

    def grade(self) -> Any:
        self.asked += 1
        return self.worth() if callable(self.worth) else self.worth


def rewards(record: Trajectory) -> list[float]:
    return [turn.reward for turn in record.agent_turns("agent")]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"max_context_tokens": 18}, "max_tokens"),
        ({"working_time_s": 1}, "working_time"),
    ],
)
async def test_an_episode_that_a_limit_ends_gets_the_grade_of_its_state(limits: dict[str, Any], reason: str) -> None:
    clock = Clock()

    def slow(request: Any) -> Any:
        clock.now += 1
        return say("x")

    environment = Graded()
    record = await play(Script(slow), lambda: environment, clock=clock, limits=limits)
    assert (record.status, record.stop_reason) == ("truncated", reason)
    assert rewards(record) == [*[0.0] * (len(rewards(record)) - 1), 1.0]
    last = record.agent_turns("agent")[-1]
    assert (last.reward_parts, last.truncated, last.terminated) == ({"grade": 1.0}, True, False)
    assert environment.asked == 1


async def test_an_engine_that_refuses_a_long_prompt_is_a_limit_too() -> None:
    record = await play(Script(say("x"), LONG), Graded)
    assert (record.stop_reason, rewards(record)) == ("max_tokens", [1.0])


async def test_no_grade_is_asked_for_without_a_turn_and_where_the_environment_or_a_failure_ended_the_episode() -> None:
    environments = [Graded(last=1), Graded(last=1, truncate=True), Graded(), Graded()]
    ended = [
        await play(Script(say("x")), lambda: environments[0]),
        await play(Script(say("x")), lambda: environments[1]),
        await play(Script(say("x")), lambda: environments[2], limits={"max_context_tokens": 1}),
        await play(Script(ValueError("no")), lambda: environments[3]),
    ]
    assert [record.status for record in ended] == ["finished", "truncated", "truncated", "failed"]
    assert [environment.asked for environment in environments] == [0, 0, 0, 0]


async def test_a_grade_may_have_an_info_with_parts_and_none_changes_nothing() -> None:
    graded = (0.5, {"reward_parts": {"tests": 0.75, "style": -0.25}, "passed": 3})
    record = await play(Script(say("x")), lambda: Graded(graded), limits={"max_turns": 1})
    assert rewards(record) == [0.5]
    assert record.agent_turns("agent")[0].reward_parts == {"tests": 0.75, "style": -0.25}
    assert record.infos[-1]["grade"] == {"passed": 3}
    record = await play(Script(say("x")), lambda: Graded(lambda: None), limits={"max_turns": 1})
    assert (rewards(record), record.agent_turns("agent")[0].reward_parts) == ([0.0], {})


async def test_an_environment_without_a_grade_keeps_its_rewards() -> None:
    class Grades(Turns):
        def grade(self, answer: str) -> float:  # a method of its own
            raise AssertionError(answer)

    for environment in (Turns, Grades):
        record = await play(Script(say("x")), environment, limits={"max_turns": 2})
        assert (record.status, rewards(record)) == ("truncated", [1.0, 2.0])


@pytest.mark.parametrize(
    ("worth", "kind"),
    [
        (math.nan, "reward-not-finite"),
        ("1", "reward-not-a-number"),
        ((1.0, {}, 0), "grade-shape"),
        (lambda: 1 / 0, "grade-raised"),
        (lambda: asyncio.Event().wait(), "environment-timeout"),
    ],
)
async def test_a_grade_that_fails_is_a_failure_of_the_environment_and_no_reward(worth: Any, kind: str) -> None:
    limits = {"max_turns": 1, "environment_timeout_s": 0.05}
    record = await play(Script(say("x")), lambda: Graded(worth), limits=limits)
    assert failure_of(record)[:2] == ("environment", kind)
    assert record.failure is not None
    assert record.failure.message.startswith("Grading: ")


async def test_a_grade_runs_where_the_steps_run_and_may_be_a_coroutine() -> None:
    threads: list[str] = []

    class Blocks(Graded):
        blocking = True

        async def grade(self) -> Any:
            await asyncio.sleep(0)
            return 1.0

    class Threaded(Blocks):
        def grade(self) -> Any:
            threads.append(threading.current_thread().name)
            return 1.0

    for environment in (Blocks, Threaded):
        record = await play(Script(say("x")), environment, clock=time.monotonic, limits={"max_turns": 1})
        assert rewards(record) == [1.0]
    assert threads == ["environment"]


async def test_a_grade_that_hangs_on_its_thread_is_abandoned_at_its_deadline() -> None:
    gate = threading.Event()

    class Hangs(Graded):
        blocking = True

        def grade(self) -> Any:
            gate.wait(20)
            return 1.0

    limits = {"max_turns": 1, "environment_timeout_s": 0.05}
    record = await play(Script(say("x")), Hangs, clock=time.monotonic, limits=limits)
    gate.set()
    assert failure_of(record)[:2] == ("environment", "environment-timeout")


async def test_an_environment_in_a_process_of_its_own_is_graded_there() -> None:
    import tests.workers.heavy  # noqa: F401 - registers

    made = tools(Script(say("wait")), OneTurn, time.monotonic)
    made.processes = EnvironmentProcesses(["tests.workers.heavy"])
    made.make_environment = headrace.make
    try:
        for kwargs, expected in (({"worth": 0.5}, 0.5), ({}, 0.0)):
            task = Task(environment="test:Heavy", seed=5, kwargs=kwargs)
            episode = EpisodeRun(made, assignment(task=task), plan(limits={"max_turns": 1}))
            record = await episode.run()
            await episode.close()
            assert (record.status, rewards(record)) == ("truncated", [expected])
    finally:
        made.threads.close()
        await made.processes.close()


async def test_agents_are_graded_by_name() -> None:
    class Judged(Table):
        def grade(self) -> Any:
            return {"ann": 0.25, "bob": 0.75}, {"bob": {"reward_parts": {"style": 0.75}}}

    record = await play(
        Script(say("x")), lambda: Judged(move({"ann": 1.0}), move({"bob": 0.0}), order="aba"), limits={"max_turns": 2}
    )
    assert (record.status, rewards_of(record)) == ("truncated", {"ann": [1.25], "bob": [0.75]})
    assert record.agent_turns("bob")[0].reward_parts == {"style": 0.75}

    class Wrong(Judged):
        def grade(self) -> Any:
            return {"eve": 1.0}

    record = await play(Script(say("x")), lambda: Wrong(move({"ann": 1.0}), order="ab"), limits={"max_turns": 1})
    assert failure_of(record)[:2] == ("environment", "unknown-agent")


async def test_the_python_tool_passes_the_grade_of_its_environment_on() -> None:
    headrace.register("test:Graded", Graded)
    headrace.register("test:Ungraded", Turns)
    for name, expected in (("test:Graded", 1.0), ("test:Ungraded", 1.0)):
        record = await play(Script(say("x")), lambda name=name: PythonTool(name), limits={"max_turns": 1})
        assert (record.status, rewards(record)) == ("truncated", [expected])


async def test_a_game_that_a_limit_ends_is_graded_by_the_nearness_of_its_last_guess() -> None:
    for success_only, expected in ((False, 1 - 10 / 49), (True, 0.0)):
        kwargs = {"low": 1, "high": 50, "target": 30, "success_only": success_only}
        task = Task(environment="game:GuessTheNumber-v0", seed=5, kwargs=kwargs)
        record = await play(
            Script(say(r"\boxed{20}")),
            lambda **kwargs: headrace.make("game:GuessTheNumber-v0", **kwargs),
            asked=assignment(task=task),
            limits={"max_turns": 1},
        )
        assert (record.status, rewards(record)) == ("truncated", [pytest.approx(expected)])

"""Failures in an episode: their layers and kinds, and the single record in which each ends."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from headrace.environment import Step
from headrace.errors import EnvironmentFailure, PolicyFailure, ToolFailure
from headrace.trajectory import Message, Task
from headrace.validation import validate
from headrace_workers.episode import EnvironmentThreads, EpisodeRun
from headrace_workers.episode.environment_threads import CallAbandonedError
from tests.workers.fakes import Clock, OneTurn, Script, Turns, assignment, failure_of, plan, play, say, tools


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, True, "1"])
async def test_a_reward_that_is_not_a_finite_number_is_a_failure_never_a_score(reward: Any) -> None:
    class Odd(Turns):
        def step(self, action: str) -> Any:
            step = Step(*super().step(action))
            return step._replace(reward=reward) if self.turn == 2 else step

    record = await play(Script(say("x")), Odd)
    layer, kind, retryable = failure_of(record)
    assert layer == "environment"
    assert kind in ("reward-not-finite", "reward-not-a-number")
    assert not retryable
    assert [turn.reward for turn in record.segments[0].turns] == [1.0]
    assert record.messages[-1] == Message(role="assistant", content="x", agent="agent", turn=1)
    assert record.failure is not None
    assert record.failure.message.startswith("Turn 1: ")


def raising(error: BaseException, where: str) -> Callable[[], Any]:
    class Raises(OneTurn):
        def __init__(self) -> None:
            if where == "constructor":
                raise error

        def reset(self, seed: int | None = None) -> Any:
            if where == "reset":
                raise error
            return super().reset(seed)

        def step(self, action: str) -> Any:
            raise error

    return Raises


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
async def test_an_exception_of_an_environment_is_reported_with_its_place_type_and_frames(where: str) -> None:
    record = await play(Script(say("x")), raising(KeyError("missing"), where))
    assert failure_of(record) == ("environment", f"{where}-raised", True)
    assert record.failure is not None
    assert "KeyError: 'missing'" in record.failure.message
    assert "test_failures.py" in record.failure.message


class OddError(BaseException):
    """Neither an Exception nor any of Python's own."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ENDINGS = [
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    OddError(),
    UnspeakableError(),
]


@pytest.mark.parametrize("style", ["inline", "coroutine", "thread"])
@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
async def test_any_exception_of_an_environment_ends_its_episode_not_the_worker(
    error: BaseException, style: str
) -> None:
    class Raises(OneTurn):
        blocking = style == "thread"

        def step(self, action: str) -> Any:
            if style == "coroutine":
                return self._raise()
            raise error

        async def _raise(self) -> Any:
            raise error

    record = await play(Script(say("x")), Raises)
    assert failure_of(record) == ("environment", "step-raised", True)
    assert record.failure is not None
    assert type(error).__name__ in record.failure.message


async def test_any_exception_of_an_environments_close_is_a_failure_of_the_environment() -> None:
    class Closes(OneTurn):
        @property
        def close(self) -> Any:
            raise KeyboardInterrupt

    its_tools = tools(Script(say("x")), Closes)
    episode = EpisodeRun(its_tools, assignment(), plan())
    assert (await episode.run()).status == "finished"
    with pytest.raises(EnvironmentFailure) as caught:
        await episode.close()
    its_tools.threads.close()
    assert caught.value.kind == "close-raised"


async def test_an_exception_of_an_environments_objects_is_its_failure() -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    class Odd(OneTurn):
        def step(self, action: str) -> Any:
            return "", Unspeakable(), True, False, {}

    assert failure_of(await play(Script(say("x")), Odd)) == ("environment", "step-raised", True)


async def test_more_tokens_than_requested_are_a_failure_without_a_retry() -> None:
    record = await play(Script(say("x" * 20)), OneTurn, sampling={"max_tokens": 10})
    assert failure_of(record) == ("policy", "too-many-tokens", False)


async def test_on_truncation_an_observation_that_does_not_fit_into_the_context_is_omitted() -> None:
    class Floods(OneTurn):
        def step(self, action: str) -> Any:
            return "z" * 5000, 0.0, False, True, {}

    record = await play(Script(say("x")), Floods, limits={"max_context_tokens": 1000})
    assert (record.status, record.stop_reason) == ("truncated", "environment_truncated")
    segment = record.segments[0]
    assert len(segment.token_ids) == segment.turns[0].end
    assert segment.turns[0].truncated


async def test_a_failure_that_the_environment_names_itself_keeps_its_layer() -> None:
    error = ToolFailure("The tool broke.", kind="tool-broke", retryable=True)
    assert failure_of(await play(Script(say("x")), raising(error, "step"))) == ("tool", "tool-broke", True)


async def test_an_unknown_environment_is_a_failure_that_no_retry_mends() -> None:
    from headrace.environment import make

    its_tools = tools(Script(say("x")), OneTurn)
    its_tools.make_environment = make
    asked = assignment(task=Task(environment="nobody:Knows", seed=0))
    record = await EpisodeRun(its_tools, asked, plan()).run()
    its_tools.threads.close()
    assert failure_of(record) == ("environment", "unknown-environment", False)


async def test_a_failure_of_the_policy_ends_the_attempt_with_the_turn_named() -> None:
    error = PolicyFailure("It broke.", kind="server-error", retryable=True)
    record = await play(Script(say("x"), error), Turns)
    assert failure_of(record) == ("policy", "server-error", True)
    assert record.failure is not None
    assert record.failure.message == "Turn 1: It broke."
    assert len(record.segments[0].turns) == 1


async def test_an_invalid_sample_of_an_in_process_policy_is_a_failure() -> None:
    bad = say("x")
    bad = type(bad)(token_ids=[65, 300], logprobs=bad.logprobs, finish_reason="stop", versions=bad.versions)
    assert failure_of(await play(Script(bad), OneTurn))[:2] == ("policy", "token-out-of-range")


async def test_a_fault_of_the_worker_is_recorded_as_one() -> None:
    its_tools = tools(Script(say("x")), OneTurn)

    class Broken:
        def at(self, endpoints: Any) -> Any:
            raise ZeroDivisionError("oops")

    its_tools.policies = Broken()  # type: ignore[assignment]
    record = await EpisodeRun(its_tools, assignment(), plan()).run()
    assert failure_of(record) == ("infrastructure", "worker-fault", True)


async def test_a_cancelled_episode_ends_in_a_cancelled_record_with_the_reason() -> None:
    started = asyncio.Event()

    async def never(request: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    episode = EpisodeRun(tools(Script(say("x"), never), Turns), assignment(), plan())
    task = asyncio.create_task(episode.run())
    await started.wait()
    episode.cancel_reason = "stale"
    task.cancel()
    record = await task
    validate(record)
    assert (record.status, record.stop_reason) == ("cancelled", "cancelled")
    assert record.failure is not None
    assert record.failure.message == "stale"
    assert len(record.segments[0].turns) == 1


async def test_a_policy_that_does_not_answer_in_time_is_a_failure() -> None:
    async def never(request: Any) -> Any:
        await asyncio.Event().wait()

    record = await play(Script(never), OneTurn, limits={"policy_timeout_s": 0.01})
    assert failure_of(record) == ("policy", "timeout", True)


class Blocks(OneTurn):
    """An environment whose step waits until the test releases it."""

    blocking = True
    gate: ClassVar[threading.Event]
    threads: ClassVar[list[str]]

    def step(self, action: str) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(30)
        return super().step(action)


@pytest.fixture
def gate() -> Any:
    Blocks.gate, Blocks.threads = threading.Event(), []
    yield Blocks.gate
    Blocks.gate.set()


async def test_a_blocking_environment_does_not_stall_the_others(gate: threading.Event) -> None:
    its_tools = tools(Script(say("x")), lambda name="": Blocks() if name else OneTurn())
    blocked = EpisodeRun(its_tools, assignment(task=Task(environment="b", seed=0, kwargs={"name": "b"})), plan())
    task = asyncio.create_task(blocked.run())
    for _ in range(20):
        assert (await EpisodeRun(its_tools, assignment(), plan()).run()).status == "finished"
    assert not task.done()
    gate.set()
    assert (await task).status == "finished"
    assert Blocks.threads == ["environment"]
    its_tools.threads.close()


async def test_a_step_that_does_not_come_back_is_abandoned_and_its_late_result_discarded(gate: threading.Event) -> None:
    its_tools = tools(Script(say("x")), Blocks)
    episode = EpisodeRun(its_tools, assignment(), plan(limits={"environment_timeout_s": 0.05}))
    record = await episode.run()
    await episode.close()
    assert failure_of(record) == ("environment", "environment-timeout", True)
    assert its_tools.threads.abandoned == 1
    gate.set()
    again = EpisodeRun(its_tools, assignment(), plan())
    assert (await again.run()).status == "finished"
    its_tools.threads.close()


async def test_a_coroutine_environment_is_awaited_within_its_deadline() -> None:
    class Slow:
        blocking = False  # so that no thread is waited for within the deadline

        def __init__(self, hangs: bool = False) -> None:
            self.hangs = hangs

        async def reset(self, seed: int | None = None) -> Any:
            return "go", {}

        async def step(self, action: str) -> Any:
            await (asyncio.Event().wait() if self.hangs else asyncio.sleep(0))
            return "", 1.0, True, False, {}

    assert (await play(Script(say("x")), Slow)).status == "finished"
    record = await play(Script(say("x")), lambda: Slow(hangs=True), limits={"environment_timeout_s": 0.01})
    assert failure_of(record) == ("environment", "environment-timeout", True)


async def test_a_coroutine_returned_after_the_deadline_is_closed(gate: threading.Event) -> None:
    async def never() -> Any:
        raise AssertionError

    def late() -> Any:
        assert gate.wait(30)
        return coroutine

    coroutine = never()
    threads = EnvironmentThreads(time.monotonic)
    with pytest.raises(CallAbandonedError):
        await threads.run(late, 0.05)
    gate.set()
    async with asyncio.timeout(30):
        while threads.hanging:
            await asyncio.sleep(0.01)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    threads.close()


async def test_a_timeout_that_the_environment_raises_itself_is_its_own_error() -> None:
    assert failure_of(await play(Script(say("x")), raising(TimeoutError("db"), "step")))[1] == "step-raised"


async def test_a_call_that_returns_after_its_deadline_is_a_failure() -> None:
    clock = Clock()

    class Late(OneTurn):
        def step(self, action: str) -> Any:
            clock.now += 61
            return super().step(action)

    assert failure_of(await play(Script(say("x")), Late, clock=clock))[1] == "environment-timeout"


async def test_an_environment_failure_in_reset_is_recorded() -> None:
    error = EnvironmentFailure("No data.", kind="no-data", retryable=True)
    record = await play(Script(say("x")), raising(error, "reset"))
    assert failure_of(record) == ("environment", "no-data", True)
    assert record.failure is not None
    assert record.failure.message == "Reset: No data."

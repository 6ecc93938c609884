"""G18: answers and references that cannot be graded in reasonable time, many concurrently, from one worker."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.errors import EnvironmentFailure
from headrace_workers.bounded_calls import BoundedCalls, LimitExceeded
from headrace_workers.environments.math_problems import MathProblems
from headrace_workers.episode import EnvironmentThreads
from headrace_workers.episode.worker_context import WorkerContext
from headrace_workers.sandboxes import EpisodeSandbox, WorkerSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 0.5
TIME_LIMIT_S = 60.0
"""Time limit for grading all answers. Tests run on busy machines; only the work of a call counts for its deadline."""

_rng = random.Random(18)
UNICODE = "".join(
    chr(_rng.choice((_rng.randrange(32, 0xD800), _rng.randrange(0xE000, 0x11000)))) for _ in range(35_000)
)

ENDLESS = [
    r"\boxed{7^{7^{7^{7}}}}",
    r"\boxed{\log_{2}(\log_{2}(10^{10^{10}}))}",
    r"\boxed{9!!!!}",
    r"\boxed{2^{300^{5}}}",
    r"\boxed{(10^{10^{8}})!}",
]
NO_ANSWERS = ["{" * 200_000, UNICODE, "", "I don't know."]
RIGHT = r"\boxed{42}"


def context_of(calls: BoundedCalls) -> WorkerContext:
    """Environment context of a worker with these bounded calls."""
    sandbox = EpisodeSandbox(WorkerSandbox(""), domain="r", clock=time.monotonic)
    return WorkerContext(sandbox, EnvironmentThreads(time.monotonic), calls, 60.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graders() -> AsyncIterator[BoundedCalls]:
    """Bounded calls whose grader is already loaded."""
    made = BoundedCalls()
    await made.call("headrace_workers.environments.math_equality:is_equal", "1", "1", time_s=60, memory_bytes=1 << 30)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def calls() -> AsyncIterator[BoundedCalls]:
    made = BoundedCalls()
    yield made
    await made.close()


class Stalls:
    """Longest CPU time of this thread between turns of the event loop. Unlike a lag, it excludes the time of other
    processes."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now_s = time.thread_time()
            self.worst_s = max(self.worst_s, now_s - before_s)
            before_s = now_s


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def grade(calls: BoundedCalls, said: str, reference: str) -> tuple[str, float, float]:
    """Outcome (or kind of the failure), reward, and duration."""
    environment = MathProblems(example={"problem": "?", "answer": reference}, grader_s=DEADLINE_S)
    environment.environment_context = context_of(calls)
    begun_at = time.monotonic()
    try:
        await environment.reset(0)
        step = await environment.step(said)
    except EnvironmentFailure as failure:
        return failure.kind, 0.0, time.monotonic() - begun_at
    (outcome,) = step.info["reward_parts"]
    return outcome, step.reward, time.monotonic() - begun_at


async def test_g18_32_concurrent_answers_are_graded_in_time_and_do_not_delay_each_other(graders: BoundedCalls) -> None:
    answers = [*ENDLESS, *NO_ANSWERS, RIGHT]
    stalls, resident = Stalls(), resident_bytes()
    watching = asyncio.create_task(stalls.watch())
    said = [answers[number % len(answers)] for number in range(31)] + [r"\boxed{\sqrt{1764}}"]
    results = await asyncio.gather(*(grade(graders, text, "42") for text in said))
    watching.cancel()
    for text, (outcome, reward, took_s) in zip(said, results, strict=True):
        assert took_s < TIME_LIMIT_S, text[:40]
        if text in ENDLESS:
            assert (outcome, reward) == ("grader_exhausted", 0.0), text[:40]
        elif text in NO_ANSWERS:
            assert (outcome, reward) == ("format_error", -0.1), text[:40]
        else:
            assert (outcome, reward) == ("right", 1.0), text[:40]
    took = {
        text: max(took_s for other, (_, _, took_s) in zip(said, results, strict=True) if other == text) for text in said
    }
    assert max(took[text] for text in said if text not in ENDLESS) < max(took[text] for text in ENDLESS)
    assert stalls.worst_s < 0.1
    assert resident_bytes() - resident < 50 << 20


async def test_g18_a_reference_that_exhausts_the_grader_is_a_failure_of_the_environment(graders: BoundedCalls) -> None:
    references = [*ENDLESS, "{" * 200_000, ""]
    results = await asyncio.gather(*(grade(graders, RIGHT, reference) for reference in references))
    for reference, (outcome, _, took_s) in zip(references, results, strict=True):
        assert outcome == "bad-reference", reference[:40]
        assert took_s < TIME_LIMIT_S, reference[:40]
    assert (await grade(graders, RIGHT, RIGHT))[:2] == ("right", 1.0)
    assert (await grade(graders, RIGHT, "I don't know."))[:2] == ("wrong", 0.0), "a text, which only itself is equal to"


async def test_g18_an_answer_that_exhausts_the_grader_earns_exhausted_reward(graders: BoundedCalls) -> None:
    environment = MathProblems(example={"problem": "?", "answer": "42"}, grader_s=0.3, exhausted_reward=-0.5)
    environment.environment_context = context_of(graders)
    await environment.reset(0)
    step = await environment.step(ENDLESS[0])
    assert (step.reward, step.info["reward_parts"]) == (-0.5, {"grader_exhausted": -0.5})


async def test_g18_a_killed_grader_is_replaced_and_its_answer_graded(calls: BoundedCalls) -> None:
    for victim in (server_pid, grader_pid):
        asking = asyncio.create_task(calls.call("time:sleep", 1.0, time_s=10.0, memory_bytes=1 << 30))
        os.kill(await victim(calls), signal.SIGKILL)
        assert await asking is None


async def test_g18_a_grader_that_is_killed_each_time_is_a_retryable_failure(calls: BoundedCalls) -> None:
    asking = asyncio.create_task(calls.call("time:sleep", 60.0, time_s=90.0, memory_bytes=1 << 30))
    killed = 0
    for _ in range(2):
        killed = await grader_pid(calls, other_than=killed)
        os.kill(killed, signal.SIGKILL)
    with pytest.raises(EnvironmentFailure, match="signal 9") as caught:
        await asking
    assert (caught.value.kind, caught.value.retryable) == ("bounded-call-lost", True)


async def grader_pid(calls: BoundedCalls, other_than: int = 0) -> int:
    """Return the process id of the running call."""
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.01)
            if calls._server is None:
                continue
            pid = calls._server._process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children and int(children[0]) != other_than:
                return int(children[0])


async def server_pid(calls: BoundedCalls) -> int:
    await grader_pid(calls)
    assert calls._server is not None
    return calls._server._process.pid


# Bounded calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "limit"),
    [
        ("time:sleep", [60], "time"),
        ("operator:pow", [7, 12_000_000], "time"),
        ("builtins:bytearray", [10**10], "memory"),
        ("json:loads", ["[" * 1_000_000], "stack"),
        ("os:abort", [], "stack"),
    ],
)
async def test_a_call_that_exceeds_its_time_or_memory_limit_raises_limit_exceeded(
    graders: BoundedCalls, function: str, arguments: list[Any], limit: str
) -> None:
    with pytest.raises(LimitExceeded) as caught:
        await graders.call(function, *arguments, time_s=0.5, memory_bytes=512 << 20)
    assert caught.value.limit == limit


async def test_a_call_returns_its_value_or_reports_its_error(graders: BoundedCalls) -> None:
    assert await graders.call("math:gcd", 12, 18, time_s=5, memory_bytes=1 << 30) == 6
    assert await graders.call("operator:mul", "x", 3_000_000, time_s=5, memory_bytes=1 << 30) == "x" * 3_000_000
    for function in ("math:sqrt", "no_such_module:f", "math:no_such_function"):
        with pytest.raises(EnvironmentFailure, match=function) as caught:
            await graders.call(function, -1, time_s=5, memory_bytes=1 << 30)
        assert (caught.value.kind, caught.value.retryable) == ("bounded-call-raised", False)


async def test_a_value_that_is_not_json_is_an_error_and_not_an_exceeded_limit(calls: BoundedCalls) -> None:
    with pytest.raises(EnvironmentFailure, match="TypeError") as caught:
        await calls.call("builtins:range", 3, time_s=10.0, memory_bytes=1 << 30)
    assert (caught.value.kind, caught.value.retryable) == ("bounded-call-raised", False)


async def test_every_call_ends_when_the_socket_closes_or_the_server_dies() -> None:
    calls = BoundedCalls()
    asking = asyncio.create_task(calls.call("time:sleep", 60.0, time_s=90.0, memory_bytes=1 << 30))
    child = await grader_pid(calls)
    asking.cancel()
    await calls.close()
    async with asyncio.timeout(5):
        while Path(f"/proc/{child}").exists():
            await asyncio.sleep(0.02)


async def test_the_server_ends_with_its_worker_even_while_it_imports_a_module(tmp_path: Path) -> None:
    (tmp_path / "endless_import.py").write_text(
        "import os, signal\nprint(os.getpid(), file=open('pid', 'w', 1))\nsignal.pause()"
    )
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALLING_WORKER), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    pid = tmp_path / "pid"
    async with asyncio.timeout(60):
        while not (pid.exists() and pid.read_text()):
            await asyncio.sleep(0.02)
    worker.kill()
    await worker.wait()
    async with asyncio.timeout(5):
        while Path("/proc", pid.read_text().strip()).exists():
            await asyncio.sleep(0.02)


CALLING_WORKER = """
import asyncio
from headrace_workers.bounded_calls import BoundedCalls
asyncio.run(BoundedCalls().call("endless_import:function", time_s=60.0, memory_bytes=1 << 30))
"""

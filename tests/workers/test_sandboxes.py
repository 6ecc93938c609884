"""The sandbox that a worker provides to its environments: waiting times, and the layers of failures."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.environment import Step
from headrace.errors import SandboxFailure
from headrace_sandbox.host import supervisor
from headrace_sandbox.host.supervisor import MADE_FOLDER
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_workers import sandboxes
from headrace_workers.environment_context import EnvironmentContext
from headrace_workers.episode import EpisodeRun
from headrace_workers.sandboxes import EpisodeSandbox, WorkerSandbox
from headrace_workers.step_clock import union_s
from tests.sandbox.memory_runtime import MemoryRuntime
from tests.sandbox.service.serving import service
from tests.workers.fakes import Clock, Script, assignment, failure_of, plan, play, say, tools
from tests.workers.runtimes import LOST, ScriptedRuntime, result, sandbox_of

PROGRAM = PythonProgram(code="print(1)")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "PAUSE_S", 0.0)


class RunsPrograms:
    """Runs a program in each step, and says what it printed; ends after ``turns``."""

    def __init__(self, turns: int = 1, limits: Limits | None = None) -> None:
        self.environment_context: EnvironmentContext | None = None
        self.turns, self.limits = turns, limits or Limits()

    def reset(self, seed: int | None = None) -> Any:
        return "go", {}

    async def step(self, action: str) -> Step:
        assert self.environment_context is not None
        self.turns -= 1
        ran = await self.environment_context.sandbox.run_code(PROGRAM, self.limits)
        return Step(ran.stdout.text, 1.0, self.turns == 0, False, {})


async def test_the_runtime_is_made_once_at_the_first_need() -> None:
    runtime, made = ScriptedRuntime(result("1\n")), []

    async def opened(name: str) -> Any:
        made.append(name)
        await asyncio.sleep(0)
        return runtime

    worker = WorkerSandbox("scripted", opened)
    assert made == []
    episodes = [EpisodeSandbox(worker, domain="r", clock=Clock()) for _ in range(5)]
    await asyncio.gather(*(episode.run_code(PROGRAM, Limits()) for episode in episodes))
    assert made == ["scripted"]
    assert {program.domain for program in runtime.programs} == {"r"}, "programs of two runs share no interpreter"
    await worker.close()
    assert runtime.closed


async def test_a_runtime_that_cannot_be_made_is_not_tried_for_each_program() -> None:
    tried = []

    async def opened(name: str) -> Any:
        tried.append(name)
        raise SandboxFailure("no bwrap", kind="runtime-missing", retryable=False)

    worker = WorkerSandbox("scripted", opened)
    for _ in range(3):
        with pytest.raises(SandboxFailure, match="no bwrap"):
            await worker.runtime()
    assert len(tried) == 1


async def test_a_worker_removes_leftovers_of_killed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(supervisor.FOLDER_VARIABLE, str(tmp_path / "state"))
    left = supervisor.state_folder() / MADE_FOLDER / f"{supervisor.this_supervisor()._replace(start_ticks=1)}-1"
    left.mkdir(parents=True)
    with pytest.raises(SandboxFailure, match="does not exist"):
        await sandboxes.open_runtime("of no kind")
    assert not left.exists()


def test_capabilities_of_a_worker_follow_from_its_sandbox() -> None:
    assert WorkerSandbox("").capabilities == ()
    assert WorkerSandbox("gvisor").capabilities == ("sandbox", "sandbox:gvisor")
    assert WorkerSandbox("unix:///run/sandbox.sock").capabilities == ("sandbox",)


async def test_a_fault_of_a_sandbox_is_tried_again_and_leaves_no_trace() -> None:
    runtime = ScriptedRuntime(LOST, LOST, result("1\n"))
    record = await play(Script(say("x")), RunsPrograms, sandbox=sandbox_of(runtime))
    assert (record.status, len(runtime.programs)) == ("finished", 3)
    assert record.messages[-1].content == "1\n"


async def test_a_fault_that_stays_fails_the_attempt_with_layer_sandbox_and_no_reward() -> None:
    runtime = ScriptedRuntime(result("1\n"), LOST)
    record = await play(Script(say("x")), lambda: RunsPrograms(turns=2), sandbox=sandbox_of(runtime))
    assert failure_of(record) == ("sandbox", "sandbox-lost", True)
    assert len(runtime.programs) == 1 + sandboxes.TRIES
    (segment,) = record.segments
    assert [turn.reward for turn in segment.turns] == [1.0], "the turn whose program had no result is none"


async def test_a_fault_that_no_try_can_mend_is_tried_once() -> None:
    runtime = ScriptedRuntime(SandboxFailure("no", kind="not-offered", retryable=False))
    record = await play(Script(say("x")), RunsPrograms, sandbox=sandbox_of(runtime))
    assert failure_of(record) == ("sandbox", "not-offered", False)
    assert len(runtime.programs) == 1


async def test_the_failure_of_a_worker_without_a_sandbox_has_the_remedy() -> None:
    record = await play(Script(say("x")), RunsPrograms)
    assert failure_of(record) == ("sandbox", "no-sandbox", False)
    assert record.failure is not None
    assert "--sandbox" in record.failure.message


async def test_a_busy_service_is_asked_again_at_the_time_that_it_names() -> None:
    busy = SandboxFailure("too many wait", kind="busy", retryable=True, retry_after_s=0.0)
    runtime = ScriptedRuntime(*[busy] * (2 * sandboxes.TRIES), result("1\n"))
    record = await play(Script(say("x")), RunsPrograms, sandbox=sandbox_of(runtime))
    assert (record.status, len(runtime.programs)) == ("finished", 2 * sandboxes.TRIES + 1)


async def test_a_service_that_stays_busy_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "OVERHEAD_S", 0.05)
    busy = SandboxFailure("too many wait", kind="busy", retryable=True, retry_after_s=0.01)
    record = await play(Script(say("x")), RunsPrograms, clock=time.monotonic, sandbox=sandbox_of(ScriptedRuntime(busy)))
    assert failure_of(record) == ("sandbox", "busy", True)


async def test_a_service_shares_itself_fairly_among_runs(tmp_path: Path) -> None:
    async with service(MemoryRuntime(), tmp_path / "s", pool={"running": 1}) as address:
        worker = WorkerSandbox(address)
        runs = [EpisodeSandbox(worker, domain=name, clock=time.monotonic) for name in ("a", "b")]
        order: list[str] = []

        async def run(sandbox: EpisodeSandbox, name: str) -> None:
            await sandbox.run_code(PythonProgram(code="sleep 0.01"), Limits())
            order.append(name)

        flood = [asyncio.ensure_future(run(runs[0], "a")) for _ in range(10)]
        await asyncio.sleep(0.02)
        await run(runs[1], "b")
        await asyncio.gather(*flood)
        assert order.index("b") < 9
        await worker.close()


async def test_a_runtime_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "OVERHEAD_S", 0.0)
    monkeypatch.setattr("headrace_sandbox.result.WHOLE_S", 0.0)
    hangs = ScriptedRuntime(lambda program: asyncio.sleep(60))
    record = await play(
        Script(say("x")),
        lambda: RunsPrograms(limits=Limits(wall_s=0.01)),
        sandbox=sandbox_of(hangs),
        clock=time.monotonic,
    )
    assert failure_of(record) == ("sandbox", "sandbox-hangs", True)


# Waiting ---------------------------------------------------------------------------------------------------------


async def test_waiting_for_a_sandbox_is_not_working_time() -> None:
    clock = Clock()

    def after_a_queue(program: PythonProgram) -> Any:
        clock.now += 7.5  # six in a queue, one for making it, half a second of work
        return result("1\n", wall_s=0.5, queue_s=6.0, start_s=1.0)

    record = await play(
        Script(say("x")),
        lambda: RunsPrograms(turns=3),
        clock=clock,
        sandbox=sandbox_of(ScriptedRuntime(after_a_queue)),
        limits={"working_time_s": 3.0, "environment_timeout_s": 2.0},
    )
    assert (record.status, record.stop_reason) == ("finished", "terminated")
    assert record.timing.environment_s == pytest.approx(1.5)
    assert record.timing.waiting_s == pytest.approx(21.0)
    assert [turn.environment_s for turn in record.segments[0].turns] == pytest.approx([0.5] * 3)


async def test_the_time_of_a_program_is_working_time() -> None:
    clock = Clock()

    def slow(program: PythonProgram) -> Any:
        clock.now += 2.0
        return result("1\n", wall_s=2.0)

    record = await play(
        Script(say("x")),
        lambda: RunsPrograms(turns=9),
        clock=clock,
        sandbox=sandbox_of(ScriptedRuntime(slow)),
        limits={"working_time_s": 3.0},
    )
    assert (record.status, record.stop_reason) == ("truncated", "working_time")


async def test_the_time_in_which_others_kept_a_program_from_the_processors_is_not_working_time() -> None:
    clock = Clock()

    def starved(program: PythonProgram) -> Any:
        clock.now += 20.0
        return result("1\n", wall_s=20.0, work_s=0.5)

    record = await play(
        Script(say("x")),
        lambda: RunsPrograms(turns=3),
        clock=clock,
        sandbox=sandbox_of(ScriptedRuntime(starved)),
        limits={"working_time_s": 3.0, "environment_timeout_s": 2.0},
    )
    assert (record.status, record.stop_reason) == ("finished", "terminated")
    assert [turn.environment_s for turn in record.segments[0].turns] == pytest.approx([0.5] * 3)


async def test_the_deadline_of_a_step_stops_while_it_waits_for_a_sandbox() -> None:
    async def queued(program: PythonProgram) -> Any:
        await asyncio.sleep(0.3)
        return result("1\n", wall_s=0.0, queue_s=0.3)

    sandbox = sandbox_of(ScriptedRuntime(queued))
    limits = {"environment_timeout_s": 0.1}
    record = await play(Script(say("x")), RunsPrograms, clock=time.monotonic, sandbox=sandbox, limits=limits)
    assert record.status == "finished"


async def test_the_deadline_of_a_step_counts_the_time_of_running_programs() -> None:
    class TakesLong(RunsPrograms):
        async def step(self, action: str) -> Step:
            await super().step(action)
            await asyncio.sleep(60)
            raise AssertionError

    async def works(program: PythonProgram) -> Any:
        await asyncio.sleep(0.2)
        return result("1\n", wall_s=0.2)

    sandbox = sandbox_of(ScriptedRuntime(works))
    limits = {"environment_timeout_s": 0.3}
    record = await play(Script(say("x")), TakesLong, clock=time.monotonic, sandbox=sandbox, limits=limits)
    assert failure_of(record) == ("environment", "environment-timeout", True)
    assert 0.25 < record.timing.environment_s < 5.0


async def test_programs_at_a_time_are_counted_once() -> None:
    clock = Clock()
    ends = {"a": 3.0, "b": 5.0}

    async def timed(program: PythonProgram) -> Any:
        await asyncio.sleep(0.0 if program.code == "a" else 0.01)
        clock.now = ends[program.code]
        return result(wall_s=2.0)

    sandbox = EpisodeSandbox(sandbox_of(ScriptedRuntime(timed)), domain="r", clock=clock)
    await asyncio.gather(*(sandbox.run_code(PythonProgram(code=code), Limits()) for code in "ab"))
    assert sandbox.steps.waited_s == 1.0, "from 1 to 3 the one ran, from 3 to 5 the other"


def test_the_union_of_intervals() -> None:
    assert union_s([]) == 0.0
    assert union_s([(5.0, 6.0), (0.0, 7.0)]) == 7.0
    assert union_s([(0.0, 1.0), (2.0, 4.0), (3.0, 5.0)]) == 4.0


# Threads ---------------------------------------------------------------------------------------------------------


async def test_an_environment_calls_blocking_functions_on_threads_and_gets_their_errors() -> None:
    seen: list[Any] = []

    class Blocks:
        def __init__(self) -> None:
            self.environment_context: EnvironmentContext | None = None

        async def reset(self, seed: int | None = None) -> Any:
            assert self.environment_context is not None
            seen.append(await self.environment_context.call(divmod, 7, 2))
            return "go", {}

        async def step(self, action: str) -> Any:
            assert self.environment_context is not None
            return await self.environment_context.call(divmod, 1, 0)

    record = await play(Script(say("x")), Blocks)
    assert seen == [(3, 1)]
    assert failure_of(record) == ("environment", "step-raised", True)
    assert record.failure is not None
    assert "ZeroDivisionError" in record.failure.message


async def test_an_environment_with_an_abandoned_call_is_not_closed() -> None:
    closed: list[int] = []

    class Hangs:
        def __init__(self) -> None:
            self.environment_context: EnvironmentContext | None = None

        def reset(self, seed: int | None = None) -> Any:
            return "go", {}

        async def step(self, action: str) -> Any:
            assert self.environment_context is not None
            await self.environment_context.call(time.sleep, 0.3)

        def close(self) -> None:
            closed.append(1)

    its_tools = tools(Script(say("x")), Hangs, time.monotonic)
    episode = EpisodeRun(its_tools, assignment(), plan(limits={"environment_timeout_s": 0.05}))
    record = await episode.run()
    await episode.close()
    its_tools.threads.close()
    assert failure_of(record) == ("environment", "environment-timeout", True)
    assert (closed, its_tools.threads.hanging) == ([], 1)
    async with asyncio.timeout(5):
        while its_tools.threads.hanging:
            await asyncio.sleep(0.02)

"""Environments in processes of their own; and G18's last, a step that holds the interpreter for seconds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.trajectory import Task, Trajectory
from headrace.validation import validate
from headrace_workers.episode import EnvironmentProcesses, EpisodeRun, environment_processes
from headrace_workers.episode.runner import EpisodeTools
from headrace_workers.worker import Worker, WorkerSettings
from tests.builders import make_id
from tests.workers.busy_machine import busy_machine
from tests.workers.fakes import OneTurn, Script, assignment, failure_of, plan, say, tools
from tests.workers.orchestrator import orchestrating


@pytest.fixture
async def its_tools() -> AsyncIterator[EpisodeTools]:
    made = tools(Script(say("go")), OneTurn)
    made.clock = time.monotonic
    made.processes = EnvironmentProcesses(["tests.workers.heavy"])
    made.make_environment = make
    yield made
    made.threads.close()
    await made.processes.close()


def make(environment_id: str, **kwargs: Any) -> Any:
    import tests.workers.heavy  # noqa: F401 - registers

    return OneTurn() if environment_id == "test:Light" else headrace.make(environment_id, **kwargs)


async def play(its_tools: EpisodeTools, action: str, environment: str = "test:Heavy", **spec: Any) -> Trajectory:
    its_tools.policies = tools(Script(say(action)), OneTurn).policies
    task = Task(environment=environment, seed=5, kwargs=spec.pop("kwargs", {}))
    episode = EpisodeRun(its_tools, assignment(task=task), plan(**spec))
    record = await episode.run()
    await episode.close()
    validate(record)
    return record


async def test_processes_that_are_returned_during_close_do_not_interrupt_it() -> None:
    processes = EnvironmentProcesses()
    taken = [await processes.take() for _ in range(4)]
    closing = asyncio.ensure_future(processes.close())
    await asyncio.sleep(0)
    for process in taken:
        process.is_usable = False
        await processes.give_back(process)
    await closing
    assert [process._process.returncode for process in taken] == [-9] * 4


async def test_the_environment_runs_in_a_process_that_is_reused_until_a_step_exceeds_its_deadline(
    its_tools: EpisodeTools,
) -> None:
    first, second = [await play(its_tools, "go") for _ in range(2)]
    assert (first.status, first.messages[0].content) == ("finished", "seed 5")
    assert [record.provenance.environment_version for record in (first, second)] == ["3", "3"]
    (pid,) = {info["pid"] for record in (first, second) for info in record.infos}
    assert pid != os.getpid()
    endless = {"exponent": 10**9}
    record = await play(its_tools, "compute", kwargs=endless, limits={"environment_timeout_s": 1.0})
    assert failure_of(record) == ("environment", "environment-timeout", True)
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)
    assert its_tools.threads.hanging == 0, "nothing of it is left, as there would be of a thread"
    assert (await play(its_tools, "go")).infos[0]["pid"] != pid


async def test_the_deadline_of_a_step_counts_only_the_work_of_its_process(its_tools: EpisodeTools) -> None:
    with busy_machine():
        computes = {"exponent": 2_000_000}
        record = await play(its_tools, "compute", kwargs=computes, limits={"environment_timeout_s": 2.0})
    assert record.status == "finished"
    assert record.timing.environment_s < 3.0


async def test_a_bound_on_the_whole_of_a_call_is_a_retryable_failure_of_ours(
    its_tools: EpisodeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(its_tools, "go")  # the process has started
    monkeypatch.setattr(environment_processes, "WHOLE_S", 0.5)
    monkeypatch.setattr(environment_processes, "WHOLE_FACTOR", 0.0)
    record = await play(its_tools, "compute", kwargs={"exponent": 10**9})
    assert failure_of(record) == ("infrastructure", "environment-process-starved", True)


WRONG: dict[str, tuple[tuple[str, str, bool], str]] = {
    "raise": (("environment", "step-raised", True), "ValueError: no [at step (heavy.py:"),
    "fail": (("simulator", "away", True), "not now"),
    "strange": (("environment", "step-raised", True), "cannot be sent to the worker"),
    "abort": (("environment", "environment-process-lost", True), "signal 6"),
}


async def test_failures_in_another_process_are_reported_like_local_ones(its_tools: EpisodeTools) -> None:
    for action, (failure, message) in WRONG.items():
        record = await play(its_tools, action)
        assert failure_of(record) == failure
        assert record.failure is not None
        assert message in record.failure.message
    record = await play(its_tools, "go", environment="test:HeavyForTwo")
    assert failure_of(record) == ("environment", "several-agents", False)


async def test_g18_a_step_that_blocks_the_interpreter_neither_loses_its_lease_nor_stalls_others(
    its_tools: EpisodeTools,
) -> None:
    its_tools.policies = tools(Script(say("compute")), OneTurn).policies

    def attempt(number: int, environment: str) -> Any:
        kwargs = {"exponent": 6_000_000} if environment == "test:Heavy" else {}
        task = Task(environment=environment, seed=1, kwargs=kwargs)
        return assignment(episode=make_id(100 + number), nonce=f"n{number}", task=task, term_s=6.0)

    async with orchestrating() as stub:
        stub.queue = [attempt(0, "test:Heavy")]
        settings = WorkerSettings(name="worker-1", orchestrator=stub.url, slots=8, grace_s=60.0)
        worker = Worker(settings, its_tools)
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(60):
                while not (its_tools.processes._all and next(iter(its_tools.processes._all))._process.pid):
                    await asyncio.sleep(0.01)
                pid = next(iter(its_tools.processes._all))._process.pid
                while computed_s(pid) < 1.0:  # it has started, and is in its step
                    await asyncio.sleep(0.01)
            stub.queue = [attempt(number, "test:Light") for number in range(1, 21)]
            asked = len(stub.heartbeats)
            await stub.until(lambda: len(stub.records) == 20)
            assert {record.task.environment for record in stub.records} == {"test:Light"}, (
                "while the heavy one computes"
            )
            await stub.until(lambda: len(stub.heartbeats) > asked + 2)
            assert make_id(100) in {key.episode for key in stub.heartbeats[-1].holding}
            await stub.until(lambda: len(stub.records) == 21)
        finally:
            worker.stop()
            await running
    assert stub.records[-1].status == "finished"


def computed_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Policies, environments and tools for tests of the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from headrace.assets import AssetData
from headrace.environment import Step
from headrace.runspec import RunSpec
from headrace.trajectory import Task, Trajectory, Version, VersionRun
from headrace.validation import validate
from headrace.wire.messages import Assignment
from headrace_workers.episode import EpisodeRun, EpisodeTools, RunPlan, make_plan
from headrace_workers.episode.environment_threads import EnvironmentThreads
from headrace_workers.policies import InProcessPolicy, Sample, SampleRequest, one_version
from headrace_workers.renderers.bytes_renderer import END
from headrace_workers.sandboxes import WorkerSandbox
from tests.builders import make_id


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


FIRST = Version(0, 1)


def say(
    text: str, *, version: Version = FIRST, versions: Sequence[VersionRun] | None = None, end: bool = True
) -> Sample:
    """A sample of this text, every logprob -0.5."""
    ids = [*text.encode(), *([END] if end else [])]
    return Sample(
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish_reason="stop" if end else "length",
        versions=list(versions) if versions is not None else one_version(len(ids), version),
    )


class Script:
    """A policy that says what it was told to, in order, and keeps the requests. An exception is raised."""

    def __init__(self, *answers: Sample | Exception | Callable[[SampleRequest], Any]) -> None:
        self.answers = list(answers)
        self.requests: list[SampleRequest] = []

    def sample(self, request: SampleRequest) -> Any:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Sample) else answer(request)


class OneTurn:
    """Ends after one turn with reward 1."""

    blocking = False

    def reset(self, seed: int | None = None) -> Any:
        return "Say hello.", {}

    def step(self, action: str) -> Any:
        return Step("", 1.0, True, False, {})


class Turns:
    """Answers ``obs k`` with reward k after turn k; ends after ``last`` turns."""

    blocking = False

    def __init__(self, last: int = 3, truncate: bool = False) -> None:
        self.last, self.truncate, self.turn = last, truncate, 0

    def reset(self, seed: int | None = None) -> Any:
        return "obs 0", {"turn": 0}

    def step(self, action: str) -> Any:
        self.turn += 1
        over = self.turn == self.last
        return f"obs {self.turn}", float(self.turn), over and not self.truncate, over, {"turn": self.turn}


def assignment(**changes: Any) -> Assignment:
    """An assigned attempt of run ``r``."""
    values: dict[str, Any] = {
        "run": "r",
        "group": make_id(1),
        "member": 0,
        "episode": make_id(2),
        "attempt": 1,
        "nonce": "n",
        "task": Task(environment="test:env", seed=11),
        "sampling_seed": 7,
        "term_s": 30.0,
    }
    return Assignment(**(values | changes))


def tools(
    policy: Any,
    environment: Callable[..., Any],
    clock: Callable[[], float] | None = None,
    sandbox: WorkerSandbox | None = None,
) -> EpisodeTools:
    """Tools with an in-process policy, one kind of environment, and ids that count."""
    clock = clock or Clock()
    numbers = count(1000)
    return EpisodeTools(
        worker="worker-1",
        policies=InProcessPolicy(policy),
        threads=EnvironmentThreads(clock),
        clock=clock,
        new_id=lambda: make_id(next(numbers)),
        make_environment=lambda environment_id, **kwargs: environment(**kwargs),
        sandbox=sandbox or WorkerSandbox(""),
    )


def plan(**spec: Any) -> RunPlan:
    """The plan of run ``r``."""
    return make_plan(RunSpec(name="r", **spec))


async def play(
    policy: Any,
    environment: Callable[..., Any],
    /,
    *,
    clock: Any = None,
    asked: Assignment | None = None,
    sandbox: WorkerSandbox | None = None,
    **spec: Any,
) -> Trajectory:
    """Run one episode to its record, which must be one that the orchestrator accepts."""
    return (await play_with_assets(policy, environment, clock=clock, asked=asked, sandbox=sandbox, **spec))[0]


async def play_with_assets(
    policy: Any,
    environment: Callable[..., Any],
    /,
    *,
    clock: Any = None,
    asked: Assignment | None = None,
    sandbox: WorkerSandbox | None = None,
    **spec: Any,
) -> tuple[Trajectory, dict[str, AssetData]]:
    """The record, and what it shows."""
    its_tools = tools(policy, environment, clock, sandbox)
    episode = EpisodeRun(its_tools, asked or assignment(), plan(**spec))
    try:
        record = await episode.run()
    finally:
        its_tools.threads.close()
    validate(record)
    return record, episode.assets


def failure_of(record: Trajectory) -> tuple[str, str, bool]:
    """Layer, kind, and whether it is retryable, of a valid record of a failed episode."""
    validate(record)
    assert (record.status, record.stop_reason) == ("failed", "failure")
    assert record.failure is not None
    return record.failure.layer, record.failure.kind, record.failure.retryable

"""A training of the demo: a new policy and a new run, an evaluation, a learner, and another evaluation.

Evaluations are greedy, over every target, through the evaluation API. If the learner fails, the training fails with the
end of the learner's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import InternalError, NothingToServe
from headrace_orchestrator.cli.demo.processes import DemoService, JsonLines, example_json
from headrace_orchestrator.cli.demo.scores import Score, evaluation_tasks, score

CHECK_INTERVAL_S = 0.3
"""Interval between checks of the learner and the service."""

STEADY_S = 1.0
"""Shortest time for a meaningful rate."""


@dataclass(frozen=True, kw_only=True)
class TrainedVersion:
    """A version made by the learner, with the results of its batch."""

    version: str
    mean_reward: float
    mean_guesses: float


@dataclass(kw_only=True)
class Progress:
    """The progress of a training, shown live."""

    run: str
    phase: str = "starting"
    steps: list[TrainedVersion] = field(default_factory=list)
    episodes_per_s: float = 0.0
    waits_on: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training. ``episodes``: all but those of evaluations. ``seconds``: from start to end."""

    run: str
    first: Score
    trained: Score
    steps: list[TrainedVersion]
    episodes: int
    failures: int
    seconds: float


class Trainer:
    """Runs trainings. ``show`` is called several times a second."""

    def __init__(
        self,
        service: DemoService,
        *,
        versions: int,
        deadline: float,
        show: Callable[[Progress], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._versions = versions
        self._deadline = deadline
        self._show = show
        self._sleep = sleep
        self._clock = clock

    def train(self, run: str, *, zero_advantages: bool) -> TrainingResult:
        """Train a new policy, or run the control with zero advantages."""
        started = self._clock()
        client = self._service.client
        progress = Progress(run=run)
        endpoint = self._service.start_policy(f"policy-{run}")
        spec = example_json("guess_the_number.json")
        client.create_run({**spec, "name": run, "policy": {**spec.get("policy", {}), "endpoints": [endpoint]}})
        first = self._evaluate(progress, "evaluating version 0")
        self._run_learner(progress, endpoint, zero_advantages)
        trained = self._evaluate(progress, "evaluating the trained version")
        client.close_run(run)
        status = client.run(run)
        return TrainingResult(
            run=run,
            first=first,
            trained=trained,
            steps=progress.steps,
            episodes=sum(status.episodes.values()),
            failures=status.episodes.get("failed", 0),
            seconds=self._clock() - started,
        )

    def _evaluate(self, progress: Progress, phase: str) -> Score:
        progress.phase, progress.waits_on = phase, ""
        client = self._service.client
        reply = client.evaluate(
            progress.run, evaluation_tasks(), temperature=0.0, wait=False, deadline_s=self._remaining_s()
        )
        while not reply.finished:
            self._check(progress)
            reply = client.evaluation(progress.run, reply.evaluation, wait_s=CHECK_INTERVAL_S)
        return score(reply)

    def _run_learner(self, progress: Progress, endpoint: str, zero_advantages: bool) -> None:
        progress.phase = "training with zero advantages" if zero_advantages else "training"
        supervisor, name = self._service.supervisor, f"learner-{progress.run}"
        arguments = ["--run", progress.run, "--policy", endpoint, "--versions", str(self._versions), "--json"]
        self._service.start_learner(name, *arguments, *(["--zero-advantages"] if zero_advantages else []))
        lines, rate = JsonLines(supervisor.log_file(name)), _Rate(self._clock)
        while supervisor.exit_code(name) is None:
            self._update(progress, lines, rate)
            self._check(progress)
            self._sleep(CHECK_INTERVAL_S)
        self._update(progress, lines, rate)
        if supervisor.exit_code(name) != 0:
            raise InternalError(f"The learner failed. The end of its log:\n{supervisor.tail(name)}")
        supervisor.stop(name)

    def _update(self, progress: Progress, lines: JsonLines, rate: _Rate) -> None:
        progress.steps += [
            TrainedVersion(version=line["version"], mean_reward=line["mean_reward"], mean_guesses=line["mean_guesses"])
            for line in lines.read()
            if "mean_guesses" in line
        ]
        status = self._service.client.run(progress.run)
        progress.episodes_per_s = rate.per_s(sum(status.episodes.values()))
        codes = [reason.code for reason in status.reasons] if status.learner_waiting else []
        progress.waits_on = ", ".join(codes)

    def _check(self, progress: Progress) -> None:
        self._service.supervisor.poll()
        self._show(progress)
        if self._remaining_s() <= 0:
            raise NothingToServe(
                f"The demo did not finish in time; it was {progress.phase}.", hint="Allow more time with --seconds."
            )

    def _remaining_s(self) -> float:
        return self._deadline - self._clock()


class _Rate:
    """The rate of a count since its first value."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._from: tuple[float, int] | None = None

    def per_s(self, count: int) -> float:
        """The mean rate so far; 0 during the first ``STEADY_S``."""
        now = self._clock()
        since, first = self._from = self._from or (now, count)
        return (count - first) / (now - since) if now - since >= STEADY_S else 0.0

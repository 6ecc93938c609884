"""100,000 simulated groups: admission never deadlocks, never leaks, never overshoots.

Each configuration runs a list of tasks to its end. Workers finish in random order, the learner holds as many batches
as it may. Groups in flight are counted from the records alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.runspec import RunSpec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Redeliver
from tests.orchestrator.scheduler.commanded import CommandedScheduler
from tests.orchestrator.scheduler.harness import BROKEN

SLOTS = 96


@dataclass
class Simulation:
    """One run to its end. ``fate`` gives the fields of an episode's outcome."""

    spec: dict[str, Any]
    fate: Callable[[Simulation, messages.Assignment], dict[str, Any]]
    hold: int = 1
    steps: tuple[int, ...] = (1,)
    overshoot: int = 0
    """Groups that an idle run may have admitted beyond its credit."""
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    version: int = 0
    admitted: int = 0
    retired: int = 0
    served: int = 0
    topped_up: int = 0
    positions: set[int] = field(default_factory=set)
    """Positions of the list whose tasks were drawn."""

    def __post_init__(self) -> None:
        ids = itertools.count()
        self.core = CommandedScheduler(epoch=1, new_id=lambda: f"i{next(ids)}", new_nonce=lambda: f"n{next(ids)}")
        spec = RunSpec(name="r", **self.spec)
        self.capacity_of_run = (spec.max_staleness + 1) * spec.batch_groups
        self.capacity = self.capacity_of_run + self.overshoot
        self.core.create_run(spec, 0.0)
        self.requests = itertools.count()
        self.running: list[messages.Assignment] = []
        self.held: list[Redeliver] = []
        self.take()

    def take(self) -> None:
        """Count groups in flight from the events of the last command."""
        for event in self.core.drain():
            if isinstance(event, events.GroupAdmitted):
                self.admitted += 1
                self.positions.add(event.position)
                assert self.admitted - self.retired <= self.capacity, "it overshoots"
            elif isinstance(event, events.GroupRetired):
                self.retired += 1
            elif isinstance(event, events.MemberAdded):
                self.topped_up += 1
            elif isinstance(event, events.BatchFormed):
                self.served += len(event.groups)

    def lease(self) -> None:
        holding = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in self.running]
        request = messages.LeaseRequest(worker="w", slots=SLOTS, free=SLOTS - len(self.running), holding=holding)
        reply = self.core.lease(request, 0.0)
        self.take()
        stopped = {cancel.episode for cancel in reply.cancels}
        for attempt in [a for a in self.running if a.episode in stopped]:
            self.finish(attempt, {"status": "cancelled"})
        self.running = [a for a in self.running if a.episode not in stopped] + reply.attempts

    def finish(self, attempt: messages.Assignment, fields: dict[str, Any]) -> None:
        outcome = events.EpisodeEnded(
            run="r",
            group=attempt.group,
            member=attempt.member,
            episode=attempt.episode,
            attempt=attempt.attempt,
            task=attempt.task,
            size_bytes=5000,
            trajectory="t",
            **fields,
        )
        assert self.core.judge("w", attempt.nonce, outcome, 0.0) == "accepted"
        self.take()

    def work(self) -> None:
        """Lease as many attempts as possible, then finish a random part of them."""
        self.lease()
        self.draw.shuffle(self.running)
        for _ in range(self.draw.randint(1, SLOTS)):
            if self.running:
                attempt = self.running.pop()
                self.finish(attempt, self.fate(self, attempt))

    def learn(self, groups: list[str] | None = None) -> messages.EmptyReply | None:
        """Pull once; ack the oldest batch if the learner holds its maximum, or gets nothing."""
        request = messages.PullRequest(learner="l", session="s", request=f"{next(self.requests)}", groups=groups)
        plan = self.core.pull("r", request, 0.0)
        if isinstance(plan, Form):
            self.held.append(self.core.form("r", plan, request, 0.0))
        self.take()
        empty = plan if isinstance(plan, messages.EmptyReply) else None
        if len(self.held) == self.hold or (empty and not self.running and self.held):
            self.ack()
        return empty

    def ack(self) -> None:
        batch = self.held.pop(0)
        self.version += self.draw.choice(self.steps)
        request = messages.AckRequest(
            learner="l", session="s", generation=batch.generation, version=f"0.{self.version}"
        )
        self.core.ack("r", batch.batch, request, 0.0)
        self.take()

    def to_the_end(self) -> None:
        idle = 0
        for turn in itertools.count():
            before = (self.admitted, self.retired, self.served, len(self.running), len(self.held))
            self.work()
            empty = self.learn()
            if empty and empty.finished and not self.running:
                break
            moved = before != (self.admitted, self.retired, self.served, len(self.running), len(self.held))
            idle = 0 if moved else idle + 1
            assert idle < 50, f"it is stuck: {empty}"
            if turn % 50 == 0:
                self.core.check()
        self.assert_quiet()

    def assert_quiet(self) -> None:
        self.core.check()
        assert self.admitted == self.retired
        status = self.core.run_status("r", 0.0)
        assert (status.in_flight, status.queued, status.leased, status.batches_open) == (0, 0, 0, 0)
        assert self.core.groups("r") == []
        if "batch_tokens" not in self.spec:
            assert status.credit == self.capacity_of_run


def fine(simulation: Simulation, attempt: messages.Assignment) -> dict[str, Any]:
    low = Version(0, simulation.version)
    return {"status": "finished", "low": low, "rewards": {"a": simulation.draw.random()}, "row_tokens": 100}


def often_broken(simulation: Simulation, attempt: messages.Assignment) -> dict[str, Any]:
    if simulation.draw.random() < 0.3:
        return {"status": "failed", "failure": BROKEN}
    return fine(simulation, attempt)


def mostly_equal(simulation: Simulation, attempt: messages.Assignment) -> dict[str, Any]:
    equal = int(attempt.task.id) % 4
    return fine(simulation, attempt) | ({"rewards": {"a": 1.0}} if equal else {})


def broken_after_a_bump(simulation: Simulation, attempt: messages.Assignment) -> dict[str, Any]:
    # The first member runs alone until the learner has announced newer versions; then it fails and is replaced.
    if attempt.member == 0 and int(attempt.task.id) % 3 == 0:
        return {"status": "failed", "failure": BROKEN}
    return fine(simulation, attempt)


def shrinking(simulation: Simulation, attempt: messages.Assignment) -> dict[str, Any]:
    tokens = 1000 if simulation.admitted < len(simulation.spec["tasks"]) // 2 else 100
    return fine(simulation, attempt) | {"row_tokens": tokens}


GROUPS = 10_000
TASKS = [{"environment": "e", "seed": seed} for seed in range(GROUPS)]

CONFIGURATIONS = {
    "dropped": ({"group_size": 2, "batch_size": 16, "short_groups": "serve"}, often_broken, {}),
    "stale": ({"group_size": 2, "batch_size": 16, "max_staleness": 1}, fine, {"steps": (1, 1, 3)}),
    "zero variance": ({"group_size": 3, "batch_size": 24, "zero_variance": "drop"}, mostly_equal, {}),
    "replaced": ({"group_size": 3, "batch_size": 24, "zero_variance": "replace"}, mostly_equal, {}),
    "complete only": ({"group_size": 2, "batch_size": 16, "short_groups": "drop"}, often_broken, {}),
    "drawn": (
        {"group_size": 2, "batch_size": 16, "max_uses": 3, "max_staleness": 8, "selection": {"order": "prioritized"}},
        fine,
        {"steps": (0, 0, 1)},
    ),
    "topped up": ({"group_size": 3, "batch_size": 24, "max_staleness": 2}, broken_after_a_bump, {}),
    "100 by 16": ({"group_size": 16, "batch_size": 100}, fine, {}),
    "20 by 8": ({"group_size": 8, "batch_size": 20}, fine, {}),
    "staleness 0 with 32": ({"group_size": 1, "batch_size": 32, "max_staleness": 0}, fine, {}),
    "shrinking tokens": ({"group_size": 2, "batch_size": 1, "batch_tokens": 20_000}, shrinking, {"overshoot": 200}),
    "two batches held": ({"group_size": 2, "batch_size": 16, "max_staleness": 1}, fine, {"hold": 2, "steps": (0, 1)}),
    "three uses": ({"group_size": 2, "batch_size": 16, "max_uses": 3, "max_staleness": 8}, fine, {"steps": (0, 0, 1)}),
}


BRIEF = ("replaced", "complete only", "drawn")
"""Cases that differ only in the groups that are served: a fifth of the groups is enough."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_admission_never_deadlocks_never_leaks_never_overshoots(name):
    spec, fate, options = CONFIGURATIONS[name]
    groups = GROUPS // 2 if spec["group_size"] >= 8 else GROUPS // 5 if name in BRIEF else GROUPS
    simulation = Simulation(spec | {"tasks": TASKS[:groups], "retries": {"quarantine_after": 99}}, fate, **options)
    simulation.to_the_end()
    assert simulation.positions == set(range(groups)), "some twice: the tasks of stale groups are drawn again"
    if name in ("staleness 0 with 32", "stale"):
        assert simulation.served == groups
    if name in ("100 by 16", "20 by 8"):
        assert simulation.served > 0.9 * groups
    if name == "topped up":
        assert simulation.topped_up > groups // 4
    if name == "three uses":
        assert simulation.served > 2 * groups


@pytest.mark.timeout(600)
def test_64_groups_submitted_at_once_are_all_served():
    simulation = Simulation({"group_size": 2, "batch_size": 16}, fine)
    for turn in range(200):
        ids = [f"g{turn}-{number}" for number in range(64)]
        requests = [
            messages.GroupRequest(task={"environment": "e", "seed": seed}, id=id) for seed, id in enumerate(ids)
        ]
        simulation.capacity = 64
        assert simulation.core.submit_groups("r", requests, 0.0) == ids
        for half in (ids[:32], ids[32:]):
            served = simulation.served
            while simulation.served == served:
                simulation.work()
                simulation.learn(half)
        while simulation.held:
            simulation.ack()
        simulation.assert_quiet()

"""Simulation of a run by the real scheduler on a virtual clock: workers whose episodes take given times, and a learner.

* The scheduler is the product's; only time, workers, policy server and learner are simulated.
* The same settings give the same result on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.runspec import RunSpec
from headrace.trajectory import Status, Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands import batches, leases, policy_servers, pulls, runs, submissions
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Redeliver
from headrace_orchestrator.scheduler.core import Scheduler

WORKER = "w"
RUN = "r"


@dataclass
class Simulation:
    """A run to be simulated. ``duration_s`` returns the time that an attempt takes at a worker, ``status`` how it ends.
    ``step_s``: time of one step of the learner. ``sync_s``: time until the policy server serves a new version; None if
    it never does. ``prefetch``: batches that the learner holds beside the one that it trains on."""

    spec: dict[str, Any]
    duration_s: Callable[[messages.Assignment], float]
    step_s: float = 0.1
    sync_s: float | None = 0.0
    slots: int = 64
    prefetch: int = 0
    status: Callable[[messages.Assignment], Status] = lambda attempt: "finished"
    now: float = 1000.0
    drawn: Counter[str] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    retired: Counter[str] = field(default_factory=Counter)
    versions: list[float] = field(default_factory=list)
    """Times at which versions were made."""
    waits: list[messages.EmptyReply] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        ids, self._order = itertools.count(), itertools.count()
        self.core = Scheduler(epoch=1, new_id=lambda: f"i{next(ids)}", new_nonce=lambda: f"n{next(ids)}")
        spec = RunSpec.model_validate({"name": RUN, "attempt_lease_s": 1e6, "batch_lease_s": 1e6, **self.spec})
        self._started = self.now
        self._served = Version(0, 0)
        self._tasks: dict[str, str] = {}
        self._running: dict[str, tuple[messages.Assignment, Version]] = {}
        self._held: list[Redeliver] = []
        self._steps = 0
        self._training = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        runs.create_run(self.core.state_at(self.now), runs.prepare(self.core.state, spec), self.now)
        self._take()

    # Time

    def run(self, versions: int, limit_s: float = 1e6) -> Simulation:
        """Simulate until ``versions`` versions are made, the run has ended, or ``limit_s`` seconds are over."""
        self._turn()
        end = self._started + limit_s
        while self._agenda and len(self.versions) < versions and not self.finished:
            self.now, _, action = heapq.heappop(self._agenda)
            if self.now > end:
                self.now = end
                break
            action()
            self._turn()
        return self

    @property
    def seconds(self) -> float:
        """Simulated time so far."""
        return self.now - self._started

    def share(self, kind: str, counts: Counter[str]) -> float:
        """The share of an environment."""
        return counts[kind] / max(1, counts.total())

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    def _turn(self) -> None:
        """Let the worker and the learner do what they can at this moment."""
        self._lease()
        if not self._training:
            self._pull()
            self._lease()

    # The worker

    def _lease(self) -> None:
        while True:
            holding = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a, _ in self._running.values()]
            request = messages.LeaseRequest(
                worker=WORKER, slots=self.slots, free=self.slots - len(holding), holding=holding
            )
            reply = leases.lease(self.core.state_at(self.now), request, self.now)
            self._take()
            for cancel in reply.cancels:
                if cancel.episode in self._running:
                    self._finish(cancel.episode, "cancelled")
            for attempt in reply.attempts:
                self._running[attempt.episode] = attempt, self._served
                self._later(self.duration_s(attempt), partial(self._finish, attempt.episode))
            if not reply.attempts:
                break
        self._try_later()

    def _try_later(self) -> None:
        """Lease again when a run that was slowed down may try again."""
        due = self.core.next_deadline()
        if due is not None and not self._running and due > self.now:
            self._later(due - self.now, lambda: None)

    def _finish(self, episode: str, status: Status = "finished") -> None:
        if episode not in self._running:
            return  # it was cancelled
        attempt, began = self._running.pop(episode)
        if status == "finished":
            status = self.status(attempt)
        done = status in ("finished", "truncated")
        outcome = events.EpisodeEnded(
            run=RUN,
            group=attempt.group,
            member=attempt.member,
            episode=attempt.episode,
            attempt=attempt.attempt,
            task=attempt.task,
            status=status,
            rewards={"agent": float(attempt.member)} if done else {},
            low=began if done else None,
            high=self._served if done else None,
            row_tokens=100 if done else 0,
            size_bytes=1000,
            trajectory=f"t{attempt.episode}",
        )
        submissions.judge(self.core.state_at(self.now), WORKER, attempt.nonce, outcome, self.now)
        self._take()

    # The learner

    def _pull(self) -> None:
        while len(self._held) <= self.prefetch:
            request = messages.PullRequest(learner="l", session="s", request=f"{next(self._order)}", wait_s=10.0)
            state = self.core.state_at(self.now)
            plan = pulls.pull(state, state.run(RUN), request, self.now)
            self._take()
            if isinstance(plan, messages.EmptyReply):
                self.finished = plan.finished and not self._held
                self.waits.append(plan)
                break
            assert isinstance(plan, Form)
            self._held.append(pulls.form(state, state.run(RUN), plan, request, self.now))
            self._take()
        if self._held:
            self._training = True
            self._later(self.step_s, self._ack)

    def _ack(self) -> None:
        batch, self._training = self._held.pop(0), False
        self._steps += 1
        version = Version(0, self._steps)
        if self.sync_s == 0:
            self._served = version
        elif self.sync_s is not None:
            self._later(self.sync_s, partial(self._load, version))
        weights = messages.Weights(path=f"w{version.n}") if self.sync_s else None
        request = messages.AckRequest(
            learner="l", session="s", generation=batch.generation, version=str(version), weights=weights
        )
        state = self.core.state_at(self.now)
        run = state.run(RUN)
        self.trained.update(self._tasks[group.id] for group in run.batches[batch.batch].groups)
        batches.ack(state, run, batch.batch, request, self.now)
        self.versions.append(self.now)
        self._take()

    def _load(self, version: Version) -> None:
        self._served = version
        state = self.core.state_at(self.now)
        weights = messages.Weights(path=f"w{version.n}")
        policy_servers.weights_served(state, state.run(RUN), version, weights, self.now)
        self._take()

    # The events

    def _take(self) -> None:
        for event in self.core.drain():
            if isinstance(event, events.GroupAdmitted):
                self._tasks[event.group] = event.task.environment
                self.drawn[event.task.environment] += 1
            elif isinstance(event, events.GroupRetired):
                self.retired[event.reason] += 1

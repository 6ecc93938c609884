"""A driver of the scheduler in place of the shell: keeps the log, checks the invariants after commands, replays."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headrace.runspec import RunSpec
from headrace.trajectory import Failure, Status, Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Redeliver
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from tests.orchestrator.scheduler.commanded import CommandedScheduler
from tests.orchestrator.scheduler.oracle import RunEvents, batch_faults

FLAKY = Failure(layer="environment", kind="step-timeout", message="The step took too long.", retryable=True)
BROKEN = Failure(layer="environment", kind="crashed", message="It raised.", retryable=False)
NO_POLICY = Failure(layer="policy", kind="unreachable", message="Connection refused.", retryable=False)


class ServedBatch:
    """A batch that a learner holds."""

    def __init__(self, run: str, lease: Redeliver, request: messages.PullRequest, groups: list[str]) -> None:
        self.run = run
        self.id = lease.batch
        self.generation = lease.generation
        self.learner = request.learner
        self.session = request.session
        self.groups = groups


class Harness:
    """One scheduler, its log, and a clock that only tests move."""

    def __init__(self, *, checked: bool = True, bounds: SharedBounds | None = None) -> None:
        self.bounds = bounds or SharedBounds()
        self.now = 1000.0
        self.log: list[events.AnyEvent] = []
        #: Events that batches are checked against, by run; None where events of the log were lost.
        self.events_by_run: defaultdict[str, RunEvents] | None = defaultdict(RunEvents) if checked else None
        self.checked = checked
        self._ids = itertools.count()
        self.core = self._scheduler()
        #: Attempts that each worker holds, as it lists them.
        self.holding: dict[str, dict[str, messages.AttemptKey]] = {}
        self.tasks: dict[str, str] = {}

    def _scheduler(self) -> CommandedScheduler:
        return CommandedScheduler(
            epoch=1,
            new_id=lambda: f"id{next(self._ids)}",
            new_nonce=lambda: f"nonce{next(self._ids)}",
            bounds=replace(self.bounds, holders=[]),
        )

    def settle(self) -> list[events.AnyEvent]:
        """Log the events of the last command, and check the invariants."""
        new = self.core.drain()
        self.log += new
        if self.events_by_run is not None:
            for event in new:
                if not isinstance(event, events.WorkerDraining):
                    self.events_by_run[event.run].take(event)
        for event in new:
            if isinstance(event, events.GroupAdmitted):
                self.tasks[event.group] = event.task.id
        if self.checked:
            self.core.check()
        return new

    # Time and restarts
    def advance(self, seconds: float) -> list[events.AnyEvent]:
        """Let time pass; ``tick`` is called at every deadline of the core."""
        begun = len(self.log)
        end = self.now + seconds
        while self.now < end:
            deadline = self.core.next_deadline()
            self.now = end if deadline is None else min(end, max(deadline, self.now))
            self.core.tick(self.now)
            self.settle()
        self.catch_up()
        return self.log[begun:]

    def catch_up(self) -> None:
        """Tick until no slice is left; each slice must emit events."""
        idle = 0
        while idle < 1000:
            deadline = self.core.next_deadline()
            if deadline is None or deadline > self.now:
                return
            self.core.tick(self.now)
            idle = 0 if self.settle() else idle + 1
        raise AssertionError("the slices do not end")

    def stall(self, seconds: float) -> list[events.AnyEvent]:
        """Stall the process for some seconds."""
        self.now += seconds
        self.core.tick(self.now)
        return self.settle()

    def replayed(self, log: Iterable[events.AnyEvent] | None = None) -> CommandedScheduler:
        core = self._scheduler()
        for event in self.log if log is None else log:
            core.apply(event, self.now)
        return core

    def restored(self, snapshot: bytes, since: int | None = None) -> CommandedScheduler:
        """A scheduler restored from a snapshot and the events from ``since`` on."""
        core = self._scheduler()
        core.restore(snapshot, self.now)
        for event in [] if since is None else self.log[since:]:
            core.apply(event, self.now)
        return core

    def restart(self, core: CommandedScheduler | None = None) -> None:
        core = core or self.replayed()
        assert core.durable() == self.core.durable()
        retiring = any(run.retiring for run in self.core.state.runs.values())
        self.core = core
        self.core.tick(self.now)
        assert self.settle() == [] or retiring

    # Runs
    def run(self, name: str = "r", **spec: Any) -> str:
        if not spec.keys() & {"environments", "tasks", "source"}:
            spec["environments"] = [{"id": "game:A"}]
        spec.pop("source", None)
        self.core.create_run(RunSpec(name=name, **spec), self.now)
        self.settle()
        return name

    def status(self, run: str = "r") -> messages.RunStatus:
        return self.core.run_status(run, self.now)

    def submit(self, *ids: str, run: str = "r", size: int | None = None) -> list[str]:
        groups = [
            messages.GroupRequest(task={"environment": "game:A", "seed": number}, size=size, id=id)
            for number, id in enumerate(ids)
        ]
        found = self.core.submit_groups(run, groups, self.now)
        self.settle()
        return found

    def evaluate(self, tasks: int = 1, run: str = "r", **request: Any) -> str:
        wanted = [{"environment": "game:E", "seed": seed} for seed in range(tasks)]
        found = self.core.start_evaluation(run, messages.EvaluationRequest(tasks=wanted, **request), self.now)
        self.settle()
        return found

    # Workers
    def lease(
        self, free: int, worker: str = "w", slots: int | None = None, **request: Any
    ) -> list[messages.Assignment]:
        return self.lease_reply(free, worker, slots, **request).attempts

    def lease_reply(
        self, free: int, worker: str = "w", slots: int | None = None, **request: Any
    ) -> messages.LeaseReply:
        held = self.holding.setdefault(worker, {})
        request.setdefault("holding", list(held.values()))
        reply = self.core.lease(
            messages.LeaseRequest(worker=worker, slots=free if slots is None else slots, free=free, **request), self.now
        )
        for attempt in reply.attempts:
            held[attempt.episode] = messages.AttemptKey(attempt.episode, attempt.attempt, attempt.nonce)
        self.settle()
        return reply

    def heartbeat(
        self, worker: str = "w", holding: list[messages.AttemptKey] | None = None, **request: Any
    ) -> messages.HeartbeatReply:
        held = list(self.holding.get(worker, {}).values()) if holding is None else holding
        beat = messages.HeartbeatRequest(worker=worker, slots=8, holding=held, **request)
        reply = self.core.heartbeat(beat, self.now)
        self.settle()
        return reply

    def hand_back(self, attempts: Iterable[messages.Assignment], worker: str = "w") -> None:
        keys = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in attempts]
        for key in keys:
            self.holding.get(worker, {}).pop(key.episode, None)
        self.core.hand_back(messages.ReturnRequest(worker=worker, attempts=keys), self.now)
        self.settle()

    def outcome(self, attempt: messages.Assignment, status: Status = "finished", **fields: Any) -> events.EpisodeEnded:
        ended = status in ("finished", "truncated")
        fields.setdefault("rewards", {"agent": 1.0} if ended else {})
        if ended:
            fields.setdefault("low", self.core.version(attempt.run))
        if status == "failed":
            fields.setdefault("failure", BROKEN)
        fields.setdefault("row_tokens", 100 if ended else 0)
        fields.setdefault("size_bytes", 1000)
        fields.setdefault("task", attempt.task)
        fields.setdefault("evaluation", attempt.evaluation)
        return events.EpisodeEnded(
            run=attempt.run,
            group=attempt.group,
            member=attempt.member,
            episode=attempt.episode,
            attempt=attempt.attempt,
            status=status,
            trajectory=f"trajectory of {attempt.episode}",
            **fields,
        )

    def finish(
        self,
        attempt: messages.Assignment,
        status: Status = "finished",
        worker: str = "w",
        nonce: str | None = None,
        **fields: Any,
    ) -> messages.SubmitVerdict:
        outcome = self.outcome(attempt, status, **fields)
        verdict = self.core.judge(worker, attempt.nonce if nonce is None else nonce, outcome, self.now)
        self.holding.get(worker, {}).pop(attempt.episode, None)
        self.settle()
        return verdict

    def work(self, worker: str = "w", slots: int = 64) -> int:
        """Lease and finish all queued episodes; returns their number."""
        count = 0
        while attempts := self.lease(slots, worker):
            for attempt in attempts:
                assert self.finish(attempt, worker=worker) == "accepted"
            count += len(attempts)
        return count

    # Learners
    def pull(
        self, session: str = "s", request: str | None = None, run: str = "r", **fields: Any
    ) -> ServedBatch | messages.EmptyReply:
        wanted = messages.PullRequest(
            learner=fields.pop("learner", "l"),
            session=session,
            request=request or f"request{next(self._ids)}",
            **fields,
        )
        plan = self.core.pull(run, wanted, self.now)
        self.settle()
        if isinstance(plan, messages.EmptyReply):
            return plan
        if isinstance(plan, Form) and self.events_by_run is not None:
            assert batch_faults(self.events_by_run[run], self.core.spec(run), plan.groups, wanted) == []
        lease = self.core.form(run, plan, wanted, self.now) if isinstance(plan, Form) else plan
        self.settle()
        return ServedBatch(run, lease, wanted, self.groups_of(lease.batch))

    def groups_of(self, batch: str) -> list[str]:
        return next(r.groups for r in self.log if isinstance(r, events.BatchFormed) and r.batch == batch)

    def resume(self, session: str = "s", run: str = "r", learner: str = "l", shards: int = 1) -> messages.ResumeReply:
        request = messages.ResumeRequest(learner=learner, session=session, shards=shards)
        reply = self.core.resume(run, request, self.now)
        self.settle()
        return reply

    def batch(self, session: str = "s", **fields: Any) -> ServedBatch:
        served = self.pull(session, **fields)
        assert isinstance(served, ServedBatch), served
        return served

    def empty(self, session: str = "s", **fields: Any) -> messages.EmptyReply:
        reply = self.pull(session, **fields)
        assert isinstance(reply, messages.EmptyReply), reply.id
        return reply

    def ack(self, batch: ServedBatch, version: str = "") -> messages.AckReply:
        request = messages.AckRequest(
            learner=batch.learner, session=batch.session, generation=batch.generation, version=version
        )
        reply = self.core.ack(batch.run, batch.id, request, self.now)
        self.settle()
        return reply

    def nack(self, batch: ServedBatch) -> None:
        request = messages.NackRequest(
            learner=batch.learner, session=batch.session, generation=batch.generation, reason="out of memory"
        )
        self.core.nack(batch.run, batch.id, request, self.now)
        self.settle()

    def announce(self, version: str, run: str = "r", path: str = "") -> str:
        weights = messages.Weights(path=path) if path else None
        reply = self.core.announce(run, messages.VersionRequest(version=version, weights=weights), self.now)
        self.settle()
        return reply.version

    def rewind(self, version: str, run: str = "r") -> str:
        reply = self.core.rewind(run, messages.RewindRequest(version=version), self.now)
        self.settle()
        return reply.version

    def prioritize(self, priorities: dict[str, float], run: str = "r") -> messages.PrioritiesReply:
        reply = self.core.set_priorities(run, messages.PrioritiesRequest(priorities=priorities), self.now)
        self.settle()
        return reply

    def set_concurrency_cap(self, slots: int | None, run: str = "r") -> bool:
        more = self.core.set_inference_slots(run, slots)
        self.settle()
        return more

    # Events of the log
    def events_of(self, kind: type[Any], since: int = 0) -> list[Any]:
        return [event for event in self.log[since:] if isinstance(event, kind)]

    def retired(self, since: int = 0) -> dict[str, str]:
        return {event.group: event.reason for event in self.events_of(events.GroupRetired, since)}

    def ends(self, episode: str) -> list[str]:
        return [event.status for event in self.events_of(events.EpisodeEnded) if event.episode == episode]

    def task_ids(self, batch: ServedBatch) -> list[str]:
        return [self.tasks[group] for group in batch.groups]


def codes(reply: messages.EmptyReply) -> list[str]:
    return [reason.code for reason in reply.reasons]


def version(text: str) -> Version:
    return Version.parse(text)

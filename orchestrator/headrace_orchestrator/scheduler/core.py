"""The scheduler core: commands in, records and replies out. Pure: no I/O, no clock, no randomness of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace import wire
from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler.records import AnyRecord, EpisodeEnded


class Redeliver(msgspec.Struct, frozen=True):
    """Serve this frozen batch; the lease is made. ``fresh`` is False where a repeated request got its batch again."""

    batch: str
    generation: int
    lease_s: float


class Form(msgspec.Struct, frozen=True):
    """A batch can be formed of these groups, in this order. Nothing is changed until ``form`` is called; the shell
    reads the members' records, computes the head, and calls it before anything else touches the core.
    ``trajectories`` are (group, ids of the stored trajectories, in member order, failed ones left out)."""

    batch: str
    groups: list[tuple[str, list[str]]]


Plan = Redeliver | Form | wire.EmptyReply


class Scheduler:
    """All state of all runs and workers.

    Every command takes ``now`` (monotonic seconds), may raise a ``HeadraceError``, and leaves the records of what it
    decided in ``drain()``; they have been applied already. A command that raises has changed nothing.
    """

    def __init__(self, *, epoch: int, new_id: Callable[[], str], new_nonce: Callable[[], str]) -> None: ...

    # Replay and inspection
    def apply(self, record: AnyRecord, now: float) -> None:
        """Take a fact from the log."""

    def drain(self) -> list[AnyRecord]:
        """The records of the commands since the last call, in order."""

    def tick(self, now: float) -> None:
        """Let time pass: expired attempt leases, batch leases, evaluations, deadlines."""

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do at the latest."""

    def check(self) -> None:
        """Raise AssertionError, with the story, if an invariant does not hold."""

    # Workers
    def lease(self, request: wire.LeaseRequest, now: float) -> wire.LeaseReply: ...
    def heartbeat(self, request: wire.HeartbeatRequest, now: float) -> wire.HeartbeatReply: ...
    def hand_back(self, request: wire.ReturnRequest, now: float) -> None: ...
    def judge(self, worker: str, nonce: str, outcome: EpisodeEnded, now: float) -> wire.SubmitVerdict:
        """Decide on a valid submission. Only on ``accepted`` does the shell store the record."""

    def drain_worker(self, worker: str, now: float) -> None: ...

    # Runs
    def create_run(self, spec: RunSpec, now: float) -> None: ...
    def close_run(self, run: str, now: float) -> None: ...
    def submit_groups(self, run: str, groups: list[wire.GroupRequest], now: float) -> list[str]: ...
    def start_evaluation(self, run: str, request: wire.EvaluationRequest, now: float) -> str: ...
    def evaluation(self, run: str, evaluation: str, now: float) -> wire.EvaluationReply: ...
    def sync_hold(self, run: str, now: float) -> tuple[float, list[str]]:
        """Seconds that a weight sync still has to wait for evaluations, and which."""

    # Learners
    def pull(self, run: str, request: wire.PullRequest, now: float) -> Plan: ...
    def form(self, run: str, plan: Form, request: wire.PullRequest, now: float) -> Redeliver: ...
    def ack(self, run: str, batch: str, request: wire.AckRequest, now: float) -> wire.AckReply: ...
    def nack(self, run: str, batch: str, request: wire.NackRequest, now: float) -> None: ...
    def announce(self, run: str, request: wire.VersionRequest, now: float) -> wire.VersionReply: ...
    def rewind(self, run: str, request: wire.RewindRequest, now: float) -> wire.VersionReply: ...
    def doing(self, run: str, request: wire.DoingRequest, now: float) -> None: ...

    # Views
    def run_status(self, run: str, now: float) -> wire.RunStatus: ...
    def run_names(self) -> list[str]: ...
    def worker_statuses(self, now: float) -> list[wire.WorkerStatus]: ...
    def spec(self, run: str) -> RunSpec: ...
    def groups(self, run: str) -> list[dict[str, Any]]:
        """Groups in flight, for pages: id, state, task, members with their states, low version."""

"""A scheduler with a method for each command and query, which takes runs by name."""

from __future__ import annotations

from typing import Any

from headrace.runspec import RunSpec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler.commands import (
    batches,
    evaluations,
    follow_ups,
    groups,
    leases,
    policy_servers,
    priorities,
    pulls,
    resume,
    runs,
    sessions,
    submissions,
    versions,
)
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Plan, Redeliver
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import EpisodeEnded
from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from tests.orchestrator.scheduler.durable_values import durable_values
from tests.orchestrator.scheduler.invariants import check_invariants


class CommandedScheduler(Scheduler):
    """The commands one at a time, as the service executes them."""

    # Invariants

    def check(self) -> None:
        check_invariants(self.state)
        next_deadline = self.next_deadline()
        for run in self.state.runs.values():
            deadline = self._deadline_of(run)
            assert deadline is None or (next_deadline is not None and next_deadline <= deadline), run.name
        for pool in {run.spec.pool for run in self.state.runs.values()}:
            ready = self.state.index.ready(pool, self.state.runs)
            queued = [run for run in self.state.runs.values() if run.queued or run.evaluation_queued]
            assert ready is not None
            assert {run.name for run in ready.runs.values()} == {run.name for run in queued if run.spec.pool == pool}

    def durable(self) -> dict[str, Any]:
        return durable_values(self.state)

    # Workers

    def lease(self, request: messages.LeaseRequest, now: float) -> messages.LeaseReply:
        return leases.lease(self.state_at(now), request, now)

    def heartbeat(self, request: messages.HeartbeatRequest, now: float) -> messages.HeartbeatReply:
        return leases.heartbeat(self.state_at(now), request, now)

    def hand_back(self, request: messages.ReturnRequest, now: float) -> None:
        leases.hand_back(self.state_at(now), request, now)

    def drain_worker(self, worker: str, now: float, key: str = "") -> None:
        leases.drain_worker(self.state_at(now), worker, key, now)

    def judge(self, worker: str, nonce: str, outcome: EpisodeEnded, now: float) -> messages.SubmitVerdict:
        return submissions.judge(self.state_at(now), worker, nonce, outcome, now)

    def worker_statuses(self, now: float) -> list[messages.WorkerStatus]:
        return views.worker_statuses(self.state, now)

    # Runs

    def create_run(self, spec: RunSpec, now: float) -> None:
        state = self.state_at(now)
        runs.create_run(state, runs.prepare(state, spec), now)

    def close_run(self, run: str, now: float) -> None:
        state = self.state_at(now)
        runs.close_run(state, state.run(run), now)

    def submit_groups(self, run: str, requests: list[messages.GroupRequest], now: float) -> list[str]:
        state = self.state_at(now)
        return groups.submit(state, state.run(run), requests, now)

    def evict(self, run: str, group: str, now: float) -> None:
        state = self.state_at(now)
        follow_ups.evict(state, state.run(run), group, now)

    def run_names(self) -> list[str]:
        return list(self.state.runs)

    def run_status(self, run: str, now: float) -> messages.RunStatus:
        return views.run_status(self.state, self.state.run(run), now)

    def groups(self, run: str) -> list[dict[str, Any]]:
        return views.groups(self.state.run(run))

    def spec(self, run: str) -> RunSpec:
        return self.state.run(run).spec

    def version(self, run: str) -> Version:
        return self.state.run(run).versions.now

    # Evaluations

    def start_evaluation(self, run: str, request: messages.EvaluationRequest, now: float) -> str:
        state = self.state_at(now)
        return evaluations.start(state, state.run(run), request, now)

    def evaluation(self, run: str, evaluation: str, now: float) -> messages.EvaluationReply:
        return evaluations.report(self.state, self.state.run(run), evaluation, now)

    def sync_hold(self, run: str, now: float) -> tuple[float, list[str]]:
        return evaluations.sync_hold(self.state.run(run), now)

    # Learners

    def pull(self, run: str, request: messages.PullRequest, now: float) -> Plan:
        state = self.state_at(now)
        return pulls.pull(state, state.run(run), request, now)

    def form(self, run: str, plan: Form, request: messages.PullRequest, now: float) -> Redeliver:
        state = self.state_at(now)
        return pulls.form(state, state.run(run), plan, request, now)

    def ack(self, run: str, batch: str, request: messages.AckRequest, now: float) -> messages.AckReply:
        state = self.state_at(now)
        return batches.ack(state, state.run(run), batch, request, now)

    def nack(self, run: str, batch: str, request: messages.NackRequest, now: float) -> None:
        state = self.state_at(now)
        batches.nack(state, state.run(run), batch, request, now)

    def dissolve(self, run: str, batch: str, reason: str, now: float, *, answering: int = 0) -> None:
        state = self.state_at(now)
        batches.dissolve(state, state.run(run), batch, reason, now, answering)

    def doing(self, run: str, request: messages.DoingRequest, now: float) -> None:
        state = self.state_at(now)
        sessions.doing(state, state.run(run), request, now)

    def resume(self, run: str, request: messages.ResumeRequest, now: float) -> messages.ResumeReply:
        state = self.state_at(now)
        return resume.resume(state, state.run(run), request, now)

    def announce(self, run: str, request: messages.VersionRequest, now: float) -> messages.VersionReply:
        state = self.state_at(now)
        return versions.announce(state, state.run(run), request, now)

    def rewind(self, run: str, request: messages.RewindRequest, now: float) -> messages.VersionReply:
        state = self.state_at(now)
        return versions.rewind(state, state.run(run), request, now)

    def set_priorities(self, run: str, request: messages.PrioritiesRequest, now: float) -> messages.PrioritiesReply:
        state = self.state_at(now)
        return priorities.set_priorities(state, state.run(run), request, now)

    # Policy servers

    def policy_servers(self, run: str) -> PolicyServersState:
        return self.state.run(run).policy_servers

    def add_server(self, run: str, address: str, now: float) -> None:
        state = self.state_at(now)
        policy_servers.add_server(state, state.run(run), messages.PolicyServerRequest(address=address), now)

    def drain_server(self, run: str, address: str, now: float) -> None:
        state = self.state_at(now)
        policy_servers.drain_server(state, state.run(run), messages.PolicyServerRequest(address=address), now)

    def remove_server(self, run: str, address: str, now: float) -> None:
        state = self.state_at(now)
        policy_servers.remove_server(state, state.run(run), messages.PolicyServerRequest(address=address), now)

    def weights_served(self, run: str, version: Version, weights: messages.Weights, now: float) -> None:
        state = self.state_at(now)
        policy_servers.weights_served(state, state.run(run), version, weights, now)

    def set_inference_slots(self, run: str, slots: int | None) -> bool:
        run_state = self.state.run(run)
        return run_state.concurrency_cap.set(slots, run_state.leased)

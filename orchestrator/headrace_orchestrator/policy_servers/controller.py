"""The controller of a run's policy servers. Pure: observations in, calls out.

* Each server is probed periodically, and has at most one pending call.
* A server that answers takes requests; one that does not is ejected with the reason, and returns when it answers.
* A draining server takes no new requests, even if it answers, and gets no new weights.
* A server checks new weights before it is paused, so refused weights cause no pause.
* A server takes requests again only after it has confirmed its version.
* A server that certainly kept its old weights continues with them; once others serve a newer version it is ejected
  until it has caught up.
* A server with unknown weights is ejected and stays paused; its requests are ended, and continue elsewhere.
* No request waits in a paused server for longer than the pause lease, whoever paused the server.
* Only the newest version is loaded; a failed load is retried, and a new version is loaded at once.
* No server is paused while an evaluation holds the served version.
* A rolling sync pauses one server at a time, while the others serve.
* A server into which another run loads its weights is left alone, and takes no requests of this run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from headrace.runspec import SyncSpec
from headrace.trajectory import Version
from headrace.wire.messages import PolicyServerState, PolicyServerStatus, Reason, Weights
from headrace.wire.policy_server import PauseMode, run_of_weight_version
from headrace_orchestrator.policy_servers.admission import Load, Reading
from headrace_orchestrator.policy_servers.server_state import CallProblem, ProbeResult, WatchedServer

PROBE_EVERY_S = 1.0
"""Interval of probes: a server that has returned is noticed after at most this time."""

CHECK_TIMEOUT_S = 600.0
"""Deadline for a server to check and hash the files of new weights. It serves requests meanwhile."""

QUICK_CALL_TIMEOUT_S = 10.0
"""Deadline for a call that needs no work at the server."""

SHUTDOWN_TIMEOUT_S = 2.0
"""Deadline for a call at the shutdown of this process."""

UNKNOWN_WEIGHTS = "?"
"""Assumed name of a server's weights after a failed load, until the next probe."""

SYNC_STAGES = ("pause", "load", "confirm", "resume")
"""Stages of a weight sync in which a server takes no requests."""

CallKind = Literal["probe", "check", "pause", "load", "resume", "end-requests"]


class PolicyServerCall(NamedTuple):
    """A call to a server. ``check`` and ``load`` concern ``weights``, which are ``version`` of ``run``.
    ``end-requests`` pauses the server and ends its requests."""

    kind: CallKind
    address: str
    timeout_s: float = math.inf
    version: Version | None = None
    weights: Weights | None = None
    mode: PauseMode = "keep"
    run: str = ""


class WeightTarget(NamedTuple):
    """The weights that a run's servers should hold. ``version``: None if the learner loads them itself. ``served``: the
    newest served version. ``hold``: an evaluation during which no server may be paused, and its remaining seconds."""

    version: Version | None = None
    weights: Weights | None = None
    served: Version = Version(0, 0)
    hold: tuple[str, float] = ("", 0.0)


class ServerResumed(NamedTuple):
    """A server resumed with ``version`` after a pause."""

    address: str
    version: Version
    paused_s: float


class SyncFailed(NamedTuple):
    """A server could not load a version."""

    address: str
    version: Version
    problem: CallProblem


class Controller:
    """The controller of all policy servers of one run. ``revision`` grows whenever a status changes. ``run``: the run
    whose weights the servers should hold."""

    def __init__(self, sync: SyncSpec, revision: int = 0, run: str = "") -> None:
        self._run = run
        self.servers: dict[str, WatchedServer] = {}
        self.target = WeightTarget()
        self.revision = revision
        self._sync = sync
        #: Addresses of servers that were removed from the run while they were paused.
        self._removed_while_paused: list[str] = []
        self._events: list[ServerResumed | SyncFailed] = []

    # Input ---------------------------------------------------------------------------------------------------

    def take_servers(self, servers: Mapping[str, bool], others: Mapping[str, str] | None = None) -> None:
        """Take the addresses of the run's current servers, each with True if it is draining. ``others``: the other run
        that loads its weights into a server, by address."""
        for address in [known for known in self.servers if known not in servers]:
            server = self.servers.pop(address)
            if server.paused_at is not None and not server.pending_call and server.weights_known:
                self._removed_while_paused.append(address)
            self.revision += 1
        for address, draining in servers.items():
            if address not in self.servers:
                self.servers[address] = WatchedServer(address, self._run)
                self.revision += 1
            server = self.servers[address]
            other_run = (others or {}).get(address, "")
            if (server.draining, server.other_run) != (draining, other_run):
                server.draining, server.other_run = draining, other_run
                server.maybe_foreign = server.maybe_foreign or bool(other_run)
                self._update_state(server)

    def take_target(self, target: WeightTarget) -> None:
        """Take the weights that the servers should hold."""
        before, self.target = self.target, target
        if (before.version, before.weights) != (target.version, target.weights):
            for server in self.servers.values():
                server.reset_failures()
                server.interim_version = server.version if server.state == "serving" else None
                if server.stage == "ready":
                    server.stage = ""
        if before[:3] != target[:3]:
            for server in self.servers.values():
                self._update_state(server)

    def take_probe(self, address: str, probe: ProbeResult, now: float) -> None:
        """Take the result of a probe."""
        server = self.servers.get(address)
        if server is None:
            return
        server.pending_call = ""
        server.probe_at = now + PROBE_EVERY_S
        changed = probe != server.last_probe
        server.last_probe = probe
        server.set_paused(probe.paused, now)  # a server that is down is not paused
        if server.stage == "confirm":
            if server.sync_target is not None and server.version == server.sync_target[0]:
                server.stage = "resume"
                server.loaded_version, server.maybe_foreign = server.version, False
            else:
                details = probe.problem or f"it reports weights {probe.weights!r}"
                self._fail(server, CallProblem("not-confirmed", f"it does not confirm the version: {details}"), now)
        self._update_state(server, changed)

    def take_result(self, call: PolicyServerCall, problem: CallProblem | None, now: float) -> None:
        """Take the result of a call."""
        server = self.servers.get(call.address)
        if server is None:
            if call.kind in ("pause", "load") and (problem is None or problem.untouched):
                self._removed_while_paused.append(call.address)
            return
        server.pending_call = ""
        if call.kind == "resume":
            self._take_resume(server, problem, now)
        elif call.kind == "end-requests":
            server.requests_ended = problem is None
        elif problem is not None:
            if call.kind == "load" and not problem.untouched and server.last_probe is not None:
                server.last_probe = server.last_probe._replace(weights=UNKNOWN_WEIGHTS)
            self._fail(server, problem, now)
        elif call.kind == "check":
            newest = (call.version, call.weights) == (self.target.version, self.target.weights)
            server.stage = "ready" if newest else ""
        elif call.kind == "pause":
            server.stage = "load"
        elif call.kind == "load":
            server.stage = "confirm"
        self._update_state(server)

    def take_reading(self, address: str, reading: Reading) -> None:
        """Take a server's load, which does not count as a change of its status."""
        if address in self.servers and isinstance(reading, Load):
            self.servers[address].load = reading

    def _take_resume(self, server: WatchedServer, problem: CallProblem | None, now: float) -> None:
        loaded, server.stage = server.stage == "resume", ""
        if problem is not None:
            return  # repeated as long as probes find it paused
        if loaded:
            server.reset_failures()
            server.interim_version = None
        if server.version is not None and server.paused_at is not None:
            self._events.append(ServerResumed(server.address, server.version, now - server.paused_at))
        server.set_paused(False, now)
        if server.last_probe is not None:
            server.last_probe = server.last_probe._replace(paused=False)

    def _fail(self, server: WatchedServer, problem: CallProblem, now: float) -> None:
        server.record_failure(problem, now)
        if server.sync_target is not None:
            self._events.append(SyncFailed(server.address, server.sync_target[0], problem))

    # Calls ----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[PolicyServerCall]:
        """The calls to make now. A server gets no other call until the result of its call is taken."""
        calls = [PolicyServerCall("resume", address, QUICK_CALL_TIMEOUT_S) for address in self._removed_while_paused]
        self._removed_while_paused.clear()
        for server in self.servers.values():
            if not server.pending_call:
                call = self._next(server, now)
                if call is not None:
                    server.pending_call = call.kind
                    calls.append(call)
                    self._update_state(server)
        return calls

    @property
    def newest_served(self) -> bool:
        """Return True if a server takes requests with the target version."""
        target = self.target.version
        return target is not None and any(
            server.state == "serving" and server.version == target for server in self.servers.values()
        )

    def shutdown_calls(self) -> list[PolicyServerCall]:
        """The calls that resume every paused server with known weights at shutdown."""
        paused = [server for server in self.servers.values() if server.paused_at is not None]
        return [
            PolicyServerCall("resume", server.address, SHUTDOWN_TIMEOUT_S)
            for server in paused
            if server.weights_known and server.pending_call != "load"
        ]

    def take_events(self) -> list[ServerResumed | SyncFailed]:
        """Return the events of weight syncs since the last call, and clear them."""
        events, self._events = self._events, []
        return events

    def due(self, now: float) -> float | None:
        """The time of the next step if nothing happens before it."""
        return min((at for server in self.servers.values() for at in self._dues(server, now)), default=None)

    def _dues(self, server: WatchedServer, now: float) -> Iterator[float]:
        if not server.pending_call:
            yield server.probe_at
            if server.retry_at > now:
                yield server.retry_at
            if server.paused_at is not None:
                at = max(server.next_instruction_at, server.paused_at + self._sync.pause_lease_s)
                if at > now:  # an earlier time was handled by the last step
                    yield at

    def _next(self, server: WatchedServer, now: float) -> PolicyServerCall | None:
        """The next call to a server, if any."""
        if server.stage in SYNC_STAGES:
            return self._continue_sync(server, now)
        if server.last_probe is not None and server.last_probe.weights == UNKNOWN_WEIGHTS:
            return PolicyServerCall("probe", server.address)
        if server.other_run:
            return PolicyServerCall("probe", server.address) if server.probe_at <= now else None
        if server.paused_at is not None and server.next_instruction_at <= now:
            call = self._call_for_paused(server, server.paused_at, now)
            if call is not None:
                server.next_instruction_at = now + PROBE_EVERY_S
                return call
        if self._may_begin_sync(server, now):
            return self._begin_sync(server, now)
        return PolicyServerCall("probe", server.address) if server.probe_at <= now else None

    def _call_for_paused(self, server: WatchedServer, paused_at: float, now: float) -> PolicyServerCall | None:
        """The call for a paused server without a sync in progress, if any. If the orchestrator loads the run's weights,
        nobody else may pause its servers."""
        loads = self.target.version is not None
        lease_over = now >= paused_at + self._sync.pause_lease_s
        if server.weights_known:
            return PolicyServerCall("resume", server.address, QUICK_CALL_TIMEOUT_S) if loads or lease_over else None
        if (lease_over or server.sync_problem is not None) and not server.requests_ended:
            return PolicyServerCall("end-requests", server.address, QUICK_CALL_TIMEOUT_S, mode="abort")
        return None

    def _may_begin_sync(self, server: WatchedServer, now: float) -> bool:
        target = self.target
        if target.version is None or not server.up or server.draining or server.retry_at > now:
            return False
        if any(other.last_probe is None for other in self.servers.values()):
            return False  # wait for the first probe of each, so that all that answer sync together
        if self._holds_target(server):
            return False
        if server.stage == "":
            return True
        others = any(other.stage in SYNC_STAGES for other in self.servers.values())
        return target.hold[1] <= 0 and not (others and self._sync.order == "rolling")

    def _begin_sync(self, server: WatchedServer, now: float) -> PolicyServerCall:
        target = self.target
        if server.stage == "":
            assert target.version is not None
            assert target.weights is not None
            server.stage = "check"
            server.sync_target = target.version, target.weights
            return PolicyServerCall("check", server.address, CHECK_TIMEOUT_S, target.version, target.weights)
        server.stage = "pause"
        server.pause_requested_at = now
        server.set_paused(True, now)
        return PolicyServerCall("pause", server.address, self._sync.pause_lease_s, mode=self._sync.pause)

    def _continue_sync(self, server: WatchedServer, now: float) -> PolicyServerCall | None:
        remaining_s = server.pause_requested_at + self._sync.pause_lease_s - now
        if server.stage == "load":
            if self.target.version is None or server.sync_target is None or remaining_s <= 0:
                reason = "the pause lease ran out" if remaining_s <= 0 else "the learner now loads weights itself"
                self._fail(server, CallProblem("pause-lease-over", reason, untouched=True), now)
                return None
            return PolicyServerCall("load", server.address, remaining_s, *server.sync_target, run=self._run)
        if server.stage == "confirm":
            return PolicyServerCall("probe", server.address)
        return PolicyServerCall("resume", server.address, QUICK_CALL_TIMEOUT_S)

    # Status ---------------------------------------------------------------------------------------------------

    def statuses(self, now: float) -> list[PolicyServerStatus]:
        """The statuses of all servers, for workers and listings."""
        return [server.status(now) for server in self.servers.values()]

    def reasons(self) -> list[Reason]:
        """The reasons for which servers keep a learner waiting: a failed, waiting or unfinished sync, or no server."""
        reasons = []
        target = self.target
        if target.version is not None:
            reasons = self._sync_reasons(target.version)
        ejected = [server for server in self.servers.values() if server.state == "ejected"]
        if ejected and len(ejected) == len(self.servers):
            details = "; ".join(f"{server.address}: {server.reason}" for server in ejected)
            reasons.append(
                Reason(
                    code="no-policy-servers",
                    message=f"No policy server takes requests. {details}.",
                    facts={"servers": len(ejected)},
                )
            )
        return reasons

    def _sync_reasons(self, version: Version) -> list[Reason]:
        if not self.servers:
            text = (
                f"Version {version} was announced with weights, but the run has no policy servers to load them: "
                "list some in policy.endpoints, or add them with `headrace servers`"
            )
            return [_reason(version, f"{text}.", kind="no-servers")]
        behind = [server for server in self.servers.values() if not server.draining and server.version != version]
        problems = [(server.address, server.sync_problem) for server in behind if server.sync_problem is not None]
        if problems:
            details = "; ".join(f"{address}: {problem.message}" for address, problem in problems)
            kind = min(problem.kind for _, problem in problems)
            return [_reason(version, f"weight sync of version {version} failed: {details}.", kind=kind)]
        if not behind:
            return []
        evaluation, hold_s = self.target.hold
        if hold_s > 0:
            text = f"weight sync of version {version} waits: evaluation {evaluation} holds version {self.target.served}"
            return [
                _reason(version, f"{text} for up to {hold_s:.0f} s.", evaluation=evaluation, hold_s=round(hold_s, 1))
            ]
        text = f"weight sync of version {version}: {len(self.servers) - len(behind)} of {len(self.servers)} servers"
        return [_reason(version, f"{text} have loaded it.")]

    def _update_state(self, server: WatchedServer, changed: bool = False) -> None:
        state, reason = self._state_of(server)
        if (state, reason) != (server.state, server.reason) or changed:
            server.state, server.reason = state, reason
            self.revision += 1

    def _state_of(self, server: WatchedServer) -> tuple[PolicyServerState, str]:
        probe = server.last_probe
        if probe is None:
            return "unknown", ""
        if server.stage in SYNC_STAGES:
            return "syncing", f"version {server.sync_target[0] if server.sync_target else None} is being loaded"
        if probe.problem:
            return "ejected", probe.problem
        if server.draining:
            return "draining", ""
        if server.other_run:
            return "ejected", f"run {server.other_run} loads its weights into it"
        problem = self._weights_problem(server, probe)
        if problem:
            return "ejected", problem
        return ("syncing", "it is paused") if probe.paused else ("serving", "")

    def _holds_target(self, server: WatchedServer) -> bool:
        """Return True if a server holds the target. Its version is not enough: other runs also count from 0.0."""
        target = self.target
        if server.version != target.version or server.maybe_foreign:
            return False
        return target.version in (target.served, server.loaded_version)

    def _weights_problem(self, server: WatchedServer, probe: ProbeResult) -> str:
        """The reason that an answering server must not take requests; empty if it may."""
        version, target = server.version, self.target
        cause = f" ({server.sync_problem.message})" if server.sync_problem is not None else ""
        if probe.weights and version is None and server.weights_known:
            return f"it holds weights of run {run_of_weight_version(probe.weights)}: {probe.weights!r}{cause}"
        if probe.weights and version is None:
            return f"its weights are unknown: it reports {probe.weights!r}{cause}"
        if target.version is None:
            return ""
        foreign = server.maybe_foreign or (version == target.version and not self._holds_target(server))
        if version is not None and foreign:
            return f"its weights {version} may be another run's; it should hold this run's {target.version}{cause}"
        if version in (target.version, target.served):
            return ""
        if version is None:
            return f"it does not report the version of its weights; it should hold {target.version}"
        if version == server.interim_version and server.sync_problem is None:
            return ""  # its turn is yet to come
        return f"it holds {version} and should hold {target.version}{cause}"


def _reason(version: Version, message: str, **facts: object) -> Reason:
    return Reason(code="weight-sync", message=message, facts={"version": str(version), **facts})

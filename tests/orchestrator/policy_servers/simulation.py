"""A simulation of policy servers that carry out or fail a controller's calls, with a simulated clock."""

from __future__ import annotations

import random
from typing import NamedTuple

from headrace.runspec import SyncSpec
from headrace.trajectory import Version
from headrace.wire.messages import Weights
from headrace.wire.policy_server import loading_name, parse_weight_version
from headrace_orchestrator.policy_servers.controller import (
    Controller,
    PolicyServerCall,
    ServerResumed,
    SyncFailed,
    WeightTarget,
)
from headrace_orchestrator.policy_servers.server_state import CallProblem, ProbeResult

MIXED = "mixed"

Fault = str
"""The fault of a call: "" none; "lost": carried out, but its answer is lost; "never": not carried out; "half": a load
that ends half-way; "silent": not carried out, but answered as a success."""


class Engine:
    """The real state of one engine: the weights in its memory, the name that it gives them, and its pause."""

    def __init__(self, weights: Version) -> None:
        self.up = True
        self.holds: Version | str = weights
        self.name = str(weights)
        self.paused_at: float | None = None
        self.requests_ended = False

    @property
    def samples_under_wrong_name(self) -> bool:
        """True if it samples tokens under a wrong name."""
        named = parse_weight_version(self.name)
        return self.up and self.paused_at is None and named is not None and named != self.holds

    @property
    def samples_mixed(self) -> bool:
        """True if it samples with mixed weights."""
        return self.up and self.paused_at is None and self.holds == MIXED


class PendingCall(NamedTuple):
    """A pending call, the time of its result, and its fault."""

    at: float
    call: PolicyServerCall
    fault: Fault


class World:
    """Engines, the current controller, and the calls between them. ``bad``: versions whose files are damaged."""

    def __init__(self, addresses: list[str], sync: SyncSpec, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.sync = sync
        self.engines = {address: Engine(Version(0, 0)) for address in addresses}
        self.listed = dict.fromkeys(addresses, False)
        self.target = WeightTarget()
        self.bad: set[Version] = set()
        #: Faults of the next calls, by address. Calls without an entry fail at random, with probability ``faulty``.
        self.faults: dict[str, list[Fault]] = {}
        self.faulty = 0.0
        self.pending: list[PendingCall] = []
        self.events: list[ServerResumed | SyncFailed] = []
        self.calls: list[PolicyServerCall] = []
        self.longest_pause_s = 0.0
        self.controller = Controller(sync)

    # Actions -------------------------------------------------------------------------------------------------

    def announce(self, n: int, *, bad: bool = False) -> None:
        version = Version(0, n)
        if bad:
            self.bad.add(version)
        self.target = self.target._replace(version=version, weights=Weights(path=f"/weights/{n}"))

    def crash(self) -> None:
        """Restart the controller: some pending calls are still carried out, and all their results are lost."""
        for due in self.pending:
            if self.random.random() < 0.5:
                self._carry_out(due)
        self.pending.clear()
        self.controller = Controller(self.sync)

    def die(self, address: str) -> None:
        """Restart an engine, which then has its first weights."""
        self.engines[address] = Engine(Version(0, 0))

    def pass_time(self, seconds: float) -> None:
        """Advance the simulation, and check its invariants at every step."""
        end = self.now + seconds
        while True:
            self._step()
            due = self.controller.due(self.now)
            at = min([end, *(item.at for item in self.pending), *([] if due is None else [max(due, self.now)])])
            if at >= end:
                break
            self.now = max(at, self.now + 1e-6)
            self._deliver_results()
        self.now = end
        self._deliver_results()
        self._step()

    # Simulation -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.controller.take_servers(self.listed)
        self.controller.take_target(self.target)
        for call in self.controller.step(self.now):
            self.calls.append(call)
            faults = self.faults.get(call.address, [])
            fault = "" if call.kind == "probe" else faults.pop(0) if faults else self._random_fault()
            takes_s = call.timeout_s if fault in ("lost", "never") else self.random.uniform(0.001, 0.3)
            self.pending.append(PendingCall(self.now + min(takes_s, call.timeout_s), call, fault))
        self.events += self.controller.take_events()
        if self.controller.newest_served and self.target.version is not None:
            self.target = self.target._replace(served=self.target.version)
        self._check()

    def _random_fault(self) -> Fault:
        return self.random.choice(["lost", "never", "half"]) if self.random.random() < self.faulty else ""

    def _deliver_results(self) -> None:
        for due in sorted([item for item in self.pending if item.at <= self.now]):
            self.pending.remove(due)
            problem = self._carry_out(due)
            if due.call.kind == "probe":
                self.controller.take_probe(due.call.address, self._probe_result(due.call.address), self.now)
            else:
                self.controller.take_result(due.call, problem, self.now)

    def _probe_result(self, address: str) -> ProbeResult:
        engine = self.engines.get(address)
        if engine is None or not engine.up:
            return ProbeResult("nothing listens at this address")
        return ProbeResult(weights=engine.name, paused=engine.paused_at is not None)

    def _carry_out(self, due: PendingCall) -> CallProblem | None:
        call, fault = due.call, due.fault
        engine = self.engines.get(call.address)
        if call.kind == "probe":
            return None
        failed = CallProblem("timeout", "no answer", untouched=call.kind != "load")
        if engine is None or not engine.up:
            return failed
        if fault == "silent":
            return None
        if fault != "never":
            problem = self._apply(engine, call, fault)
            if problem is not None:
                return problem
        return failed if fault else None

    def _apply(self, engine: Engine, call: PolicyServerCall, fault: Fault) -> CallProblem | None:
        if call.kind == "resume":
            engine.paused_at = None
            engine.requests_ended = False
        elif call.kind in ("pause", "end-requests"):
            if engine.paused_at is None:
                engine.paused_at = self.now
            engine.requests_ended = engine.requests_ended or call.kind == "end-requests"
        elif call.version in self.bad:
            return CallProblem("weights-refused", "cut short", untouched=True)
        elif call.kind == "load":
            assert call.version is not None
            if engine.paused_at is None:
                return CallProblem("not-paused", "started again", untouched=True)
            engine.name = loading_name(engine.name, str(call.version))
            engine.holds = MIXED if fault == "half" else call.version
            if not fault or (fault == "lost" and self.random.random() < 0.5):
                engine.name = str(call.version)
        return None

    def _check(self) -> None:
        """Check the invariants."""
        statuses = {server.address: server for server in self.controller.statuses(self.now)}
        for address, engine in self.engines.items():
            assert not engine.samples_under_wrong_name, f"{address} holds {engine.holds} and says {engine.name}"
            assert not engine.samples_mixed, f"{address} samples with mixed weights"
            if engine.up and engine.paused_at is not None and not engine.requests_ended:
                self.longest_pause_s = max(self.longest_pause_s, self.now - engine.paused_at)
            status = statuses.get(address)
            if status is not None and status.state == "serving" and self.controller.servers[address].pending_call == "":
                assert engine.holds != MIXED, f"{address} serves with mixed weights"

"""Policy servers that obey a controller, or fail it, on a clock that only tests move."""

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
"""How a call goes wrong: "" not at all; "lost" it is done and its answer is lost; "never" it is not done; "half" a load
that breaks off; "silent" it is not done, and answered well."""


class Engine:
    """One engine as it really is: what is in its memory, what it calls it, and whether it is paused."""

    def __init__(self, held: Version) -> None:
        self.up = True
        self.holds: Version | str = held
        self.name = str(held)
        self.paused_at: float | None = None
        self.requests_ended = False

    @property
    def lies(self) -> bool:
        """Whether it samples tokens under a name that is not true."""
        named = parse_weight_version(self.name)
        return self.up and self.paused_at is None and named is not None and named != self.holds

    @property
    def samples_nonsense(self) -> bool:
        """Whether it samples with weights that nobody knows."""
        return self.up and self.paused_at is None and self.holds == MIXED


class Due(NamedTuple):
    """A call that is under way, and what will come of it."""

    at: float
    call: PolicyServerCall
    fault: Fault


class World:
    """Engines, the controller of the moment, and the calls between them. ``bad``: versions whose files are bad."""

    def __init__(self, addresses: list[str], sync: SyncSpec, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.sync = sync
        self.engines = {address: Engine(Version(0, 0)) for address in addresses}
        self.listed = dict.fromkeys(addresses, False)
        self.target = WeightTarget()
        self.bad: set[Version] = set()
        #: Faults of the calls to come, by address; without, the share of calls that go wrong in one way or another.
        self.faults: dict[str, list[Fault]] = {}
        self.faulty = 0.0
        self.out: list[Due] = []
        self.events: list[ServerResumed | SyncFailed] = []
        self.calls: list[PolicyServerCall] = []
        self.longest_pause_s = 0.0
        self.controller = Controller(sync)

    # What tests do --------------------------------------------------------------------------------------------

    def announce(self, n: int, *, bad: bool = False) -> None:
        version = Version(0, n)
        if bad:
            self.bad.add(version)
        self.target = self.target._replace(version=version, weights=Weights(path=f"/weights/{n}"))

    def crash(self) -> None:
        """The orchestrator dies and is there again: of calls under way some are still carried out, all answers lost."""
        for due in self.out:
            if self.random.random() < 0.5:
                self._do(due)
        self.out.clear()
        self.controller = Controller(self.sync)

    def die(self, address: str) -> None:
        """An engine dies and is there again, fresh."""
        self.engines[address] = Engine(Version(0, 0))

    def pass_time(self, seconds: float) -> None:
        """Let the world go on; what is true at every moment is checked at every moment."""
        end = self.now + seconds
        while True:
            self._step()
            due = self.controller.due(self.now)
            at = min([end, *(item.at for item in self.out), *([] if due is None else [max(due, self.now)])])
            if at >= end:
                break
            self.now = max(at, self.now + 1e-6)
            self._answer()
        self.now = end
        self._answer()
        self._step()

    # How it goes ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.controller.take_servers(self.listed)
        self.controller.take_target(self.target)
        for call in self.controller.step(self.now):
            self.calls.append(call)
            faults = self.faults.get(call.address, [])
            fault = "" if call.kind == "probe" else faults.pop(0) if faults else self._drawn()
            takes_s = call.timeout_s if fault in ("lost", "never") else self.random.uniform(0.001, 0.3)
            self.out.append(Due(self.now + min(takes_s, call.timeout_s), call, fault))
        self.events += self.controller.events()
        if self.controller.newest_served and self.target.version is not None:
            self.target = self.target._replace(held=self.target.version)
        self._check()

    def _drawn(self) -> Fault:
        return self.random.choice(["lost", "never", "half"]) if self.random.random() < self.faulty else ""

    def _answer(self) -> None:
        for due in sorted([item for item in self.out if item.at <= self.now]):
            self.out.remove(due)
            problem = self._do(due)
            if due.call.kind == "probe":
                self.controller.probed(due.call.address, self._seen(due.call.address), self.now)
            else:
                self.controller.answered(due.call, problem, self.now)

    def _seen(self, address: str) -> ProbeResult:
        engine = self.engines.get(address)
        if engine is None or not engine.up:
            return ProbeResult("nobody listens there")
        return ProbeResult(weights=engine.name, paused=engine.paused_at is not None)

    def _do(self, due: Due) -> CallProblem | None:
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
            problem = self._obey(engine, call, fault)
            if problem is not None:
                return problem
        return failed if fault else None

    def _obey(self, engine: Engine, call: PolicyServerCall, fault: Fault) -> CallProblem | None:
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
        """What holds at every moment."""
        shown = {server.address: server for server in self.controller.shown(self.now)}
        for address, engine in self.engines.items():
            assert not engine.lies, f"{address} holds {engine.holds} and says {engine.name}"
            assert not engine.samples_nonsense, f"{address} samples with mixed weights"
            if engine.up and engine.paused_at is not None and not engine.requests_ended:
                self.longest_pause_s = max(self.longest_pause_s, self.now - engine.paused_at)
            state = shown.get(address)
            if state is not None and state.state == "serving" and self.controller.servers[address].busy == "":
                assert engine.holds != MIXED, f"{address} is to serve and holds mixed weights"

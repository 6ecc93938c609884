"""The watch of one run's policy servers: carries out its controllers' decisions, and reports the results to them.

* A watch that fails ends with its error; its owner starts it again.
* A stopping watch resumes paused servers, except those in the middle of a load.
* A run's concurrency cap is set before its first episode is granted, and follows the metrics of its servers.
* Server addresses that are names are looked up again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.common.timeouts import timeout
from headrace.server import logs
from headrace.wire import messages
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.policy_servers.adapters import AdapterCall
from headrace_orchestrator.policy_servers.calls import PolicyServerCalls
from headrace_orchestrator.policy_servers.capacity import CapacityMeter
from headrace_orchestrator.policy_servers.controller import Controller, PolicyServerCall, ServerResumed, WeightTarget
from headrace_orchestrator.policy_servers.discovery import Discovery
from headrace_orchestrator.scheduler.commands.evaluations import sync_hold
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.service.policy_servers.adapter_sync import AdapterSync, store_served
from headrace_orchestrator.service.policy_servers.dns_lookups import Resolve, look_up
from headrace_orchestrator.service.shell import Shell

log = logs.logger(__name__)


class PolicyServerWatch:
    """The watch of one run's servers."""

    def __init__(
        self,
        run: str,
        shell: Shell,
        server_calls: PolicyServerCalls,
        metrics: Metrics,
        resolver: Resolve,
        driver: Callable[[str], str],
        revision: int,
    ) -> None:
        self.controller = Controller(shell.run(run).spec.policy.sync, revision, run)
        #: Progress of the weight sync in words; empty while none is under way.
        self.sync = ""
        self._discovery = Discovery()
        self._meter = CapacityMeter(shell.run(run).spec.policy.admission)
        self._resolver = resolver
        self._adapters = AdapterSync(run, shell, server_calls)
        self._driver = driver
        self._run = run
        self._shell = shell
        self._server_calls = server_calls
        self._metrics = metrics
        self._woken = asyncio.Event()
        self._published_revision = self.revision
        self._calls: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        #: Servers whose metrics are being read now; a slow one gets no second request meanwhile.
        self._measuring: set[str] = set()
        self._take_servers()

    @property
    def revision(self) -> int:
        """The revision of the servers' states, which grows with each change."""
        return self.controller.revision + self._adapters.revision

    def statuses(self, now: float) -> list[messages.PolicyServerStatus]:
        """The states of all servers, for workers and listings."""
        return self._adapters.complete(self.controller.statuses(now))

    def drives(self, address: str) -> bool:
        """Return True if this run would load its weights into a server."""
        run = self._shell.run(self._run)
        if self._adapters.trains or run.done:
            return False
        return address in self.controller.servers and run.policy_servers.target is not None

    def wake(self) -> None:
        """Wake the watch after an event that may concern the servers."""
        self._woken.set()

    async def run(self) -> None:
        """Watch until the run is closed."""
        try:
            while not self._shell.run(self._run).closed:
                self._woken.clear()
                if self._error is not None:
                    raise self._error
                await self._step()
                now = self._shell.now()
                candidates = (self.controller.due(now), self._discovery.due(), self._adapters.due())
                dues = [due for due in candidates if due is not None]
                timeout_s = max(0.0, min(dues) - now) if dues else None
                await _until(self._woken, timeout_s)
            await asyncio.gather(*self._calls)  # each has a deadline
            await self._adapters.leave()
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            shutdown = [self._server_calls.carry_out(call) for call in self.controller.shutdown_calls()]
            await asyncio.gather(*shutdown, return_exceptions=True)

    async def _step(self) -> None:
        controller, run, now = self.controller, self._shell.run(self._run), self._shell.now()
        servers = run.policy_servers
        hold_s, holders = sync_hold(run, now)
        self._take_servers()
        if self._adapters.trains or run.done:
            controller.take_target(WeightTarget(served=servers.held))  # leaves the servers to other runs
        else:
            hold = (holders[0] if holders else "", hold_s)
            controller.take_target(WeightTarget(servers.target, servers.weights, servers.held, hold))
        for call in controller.step(now):
            self._start(self._carry_out(call))
        for name in self._discovery.step(now):
            self._start(self._look_up(name))
        if self._adapters.has_adapters:
            for change in self._adapters.step(controller.servers, held=hold_s > 0):
                self._start(self._adapt(change))
        self._count()
        self._take_versions(servers)
        reasons = controller.reasons() + same_weights_reasons(servers)
        servers.reasons = reasons + self._discovery.reasons() + self._adapters.reasons()
        self.sync = " ".join(reason.message for reason in reasons if reason.code == "weight-sync")
        if self.revision != self._published_revision:
            self._published_revision = self.revision
            self._shell.queues.for_policy_servers(self._run).wake_all()
        await self._record_served(servers)

    def _take_versions(self, servers: PolicyServersState) -> None:
        """Record the versions that the servers report, and offer work if one of them may be served again."""
        run = self._shell.run(self._run)
        outdated = run.outdated
        servers.probed = {
            server.address: server.version
            for server in self.controller.servers.values()
            if server.version is not None and not self._adapters.trains
        }
        if outdated and not run.outdated:
            self._shell.queues.offer_work()

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and call.exception() is not None:
            self._error = call.exception()  # the watch fails with it, and is started again
            self.wake()

    def _take_servers(self) -> None:
        """Set the run's servers, and the number of episodes that they take."""
        run, servers = self._shell.run(self._run), self.controller.servers
        registered = run.policy_servers.servers
        ejected = {server.address for server in servers.values() if server.state == "ejected"}
        self._discovery.take_servers(registered)
        drivers = {address: self._driver(address) for address in servers}
        others = {address: run for address, run in drivers.items() if run not in ("", self._run)}
        self.controller.take_servers(self._discovery.servers(registered, ejected, self._shell.now()), others)
        self._meter.take_servers(servers.values(), run.leased)
        self._update_cap()

    def _update_cap(self) -> None:
        run = self._shell.run(self._run)
        if run.concurrency_cap.set(self._meter.attainable, run.leased):
            self._shell.queues.offer_work()

    async def _record_served(self, servers: PolicyServersState) -> None:
        version, weights = servers.target, servers.weights
        if version is None or weights is None or version == servers.held or not self.controller.newest_served:
            return
        await store_served(self._shell, self._run, version, weights)

    def _count(self) -> None:
        metrics, label = self._metrics, self._metrics.run_label(self._run)
        for event in self.controller.take_events():
            if isinstance(event, ServerResumed):
                metrics.weight_sync.labels(label).observe(event.paused_s)
            else:
                metrics.weight_sync_failures.labels(label, event.problem.kind).inc()
                log.warning(
                    "weight sync failed",
                    run=self._run,
                    server=event.address,
                    version=str(event.version),
                    kind=event.problem.kind,
                    problem=event.problem.message,
                )

    async def _carry_out(self, call: PolicyServerCall) -> None:
        if call.kind == "probe":
            await self._probe(call.address)
        else:
            problem = await self._server_calls.carry_out(call)
            self.controller.take_result(call, problem, self._shell.now())
            self.wake()

    async def _probe(self, address: str) -> None:
        observed = await self._server_calls.probe(address)
        if self._adapters.has_adapters and not observed.problem:
            await self._adapters.list_at(address)
            await self._adapters.record_served()
        self.controller.take_probe(address, observed, self._shell.now())
        self.wake()
        if not observed.problem and address not in self._measuring:
            await self._measure(address)

    async def _measure(self, address: str) -> None:
        self._measuring.add(address)
        try:
            reading = await self._server_calls.read_metrics(address)
        finally:
            self._measuring.discard(address)
        self.controller.take_reading(address, reading)
        self._adapters.take_reading(reading)
        server = self.controller.servers.get(address)
        if server is not None:
            self._meter.take_reading(server, reading, self._shell.run(self._run).leased)
            self._update_cap()

    async def _adapt(self, change: AdapterCall) -> None:
        await self._adapters.carry_out(change)
        await self._adapters.record_served()
        self.wake()

    async def _look_up(self, name: str) -> None:
        await look_up(name, self._discovery, self._resolver, self._shell.now)
        self.wake()


def same_weights_reasons(servers: PolicyServersState) -> list[messages.Reason]:
    """The reason that names an earlier version with the same bytes as the target, if there is one."""
    version = servers.target
    earlier = None if version is None else servers.same_weights_as(version, servers.weights)
    if earlier is None:
        return []
    text = f"version {version} has the same weight files as version {earlier}. Was the wrong folder announced?"
    facts = {"kind": "same-weights", "version": str(version), "same_as": str(earlier)}
    return [messages.Reason(code="weight-sync", message=text, facts=facts)]


async def _until(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until the event is set, or the time is over."""
    try:
        async with timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return

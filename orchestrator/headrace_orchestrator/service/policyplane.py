"""The policy servers of all runs: each active run's are watched, and who wants to know of them can wait for news.

* A run's servers are watched from its creation to its end, and again after a restart.
* A long poll that names the revision it knows is answered at the next one.
* A watch that fails is logged whole and begins anew.
* A run's cap is there before its first episode is granted, and follows the metrics of its servers.
* Names among its servers are looked up again and again.
* Whoever stops watching lets paused servers go on, but for those that are in the middle of a load.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from headrace import wire
from headrace.errors import StoreError
from headrace_orchestrator import logs
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.policies.adapters import AdapterCall
from headrace_orchestrator.policies.control import Control
from headrace_orchestrator.policies.controller import Call, Controller, Resumed, Target
from headrace_orchestrator.policies.discovery import Discovery
from headrace_orchestrator.policies.metering import Meter
from headrace_orchestrator.scheduler.hosts import Hosting
from headrace_orchestrator.scheduler.records import (
    AnyRecord,
    BatchAcked,
    EvaluationEnded,
    GroupAdmitted,
    RunClosed,
    RunCreated,
    ServerAdded,
    ServerDrained,
    ServerRemoved,
    VersionAnnounced,
)
from headrace_orchestrator.service.adapting import Adapting
from headrace_orchestrator.service.lookups import Resolve, look_up, resolve
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.waiting import Left

log = logs.logger(__name__)

NEWS = (
    RunCreated,
    RunClosed,
    ServerAdded,
    ServerDrained,
    ServerRemoved,
    VersionAnnounced,
    BatchAcked,
    EvaluationEnded,
)
"""Facts that a watch looks at anew."""

AGAIN_S = 1.0
"""Before a watch that failed begins anew."""

REVISIONS_AN_EPOCH = 1 << 32
"""A revision grows across restarts too."""


class PolicyPlane:
    """Watches the policy servers of the runs that are active."""

    def __init__(self, shell: Shell, metrics: Metrics, epoch: int, *, resolver: Resolve = resolve) -> None:
        self._shell = shell
        self._metrics = metrics
        self._resolver = resolver
        self._epoch = epoch
        self._control = Control()
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        shell.listeners.append(self._tell)
        for name in shell.core.run_names():
            self._begin(name)

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._control.close()

    async def servers(self, run: str, revision: int, wait_s: float, left: Left) -> wire.ServersReply:
        """The policy servers of a run; waits while ``revision`` is still theirs. Raises UnknownRun."""
        shell = self._shell
        shell.core.spec(run)  # raises UnknownRun
        deadline = shell.now() + wait_s
        while True:
            watch = self._watches.get(run)
            now = shell.now()
            if watch is None or watch.revision != revision or now >= deadline or shell.draining:
                break
            await shell.bells.of_servers(run).wait(deadline - now, left)
        if watch is None:  # the run is closed
            return wire.ServersReply(epoch=self._epoch, revision=0)
        return wire.ServersReply(
            epoch=self._epoch,
            revision=watch.revision,
            servers=watch.shown(now),
            sync=watch.sync,
            skipped=[str(version) for version in shell.core.hosting(run).skipped],
        )

    def shown(self, run: str) -> tuple[dict[str, int], str]:
        """How many servers of a run are in each state, and what the weight sync is at."""
        watch = self._watches.get(run)
        if watch is None:
            return {}, ""
        return dict(Counter(server.state for server in watch.controller.servers.values())), watch.sync

    def _tell(self, facts: Sequence[AnyRecord]) -> None:
        for fact in facts:
            if isinstance(fact, GroupAdmitted):
                if fact.adapters and fact.run in self._watches:
                    self._watches[fact.run].wake()
            elif isinstance(fact, NEWS):
                if isinstance(fact, RunCreated):
                    self._begin(fact.run)
                elif fact.run in self._watches:
                    self._watches[fact.run].wake()

    def _begin(self, name: str) -> None:
        if not self._shell.core.closed(name):
            self._watches[name] = self._watch(name)
            self._tasks[name] = asyncio.create_task(self._keep_watching(name))

    def _watch(self, name: str, revision: int = 0) -> Watch:
        first = revision or self._epoch * REVISIONS_AN_EPOCH
        return Watch(name, self._shell, self._control, self._metrics, self._resolver, first)

    async def _keep_watching(self, name: str) -> None:
        while True:
            watch = self._watches[name]
            try:
                await watch.run()
            except Exception:
                log.exception("the watch over policy servers failed", run=name)
                await asyncio.sleep(AGAIN_S)
                self._watches[name] = self._watch(name, watch.revision + 1)
            else:
                del self._watches[name], self._tasks[name]
                self._shell.bells.of_servers(name).ring_all()
                return


class Watch:
    """Watches the servers of one run."""

    def __init__(
        self, run: str, shell: Shell, control: Control, metrics: Metrics, resolver: Resolve, revision: int
    ) -> None:
        self.controller = Controller(shell.core.spec(run).policy.sync, revision)
        #: What the weight sync is at, in words; empty where there is nothing to say.
        self.sync = ""
        self._discovery = Discovery()
        self._meter = Meter(shell.core.spec(run).policy.admission)
        self._resolver = resolver
        self._adapting = Adapting(run, shell, control)
        self._run = run
        self._shell = shell
        self._control = control
        self._metrics = metrics
        self._news = asyncio.Event()
        self._told = self.revision
        self._calls: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        #: Servers whose metrics are being read; one that is slow with them is not asked again meanwhile.
        self._measuring: set[str] = set()
        self._take_servers()

    @property
    def revision(self) -> int:
        """Grows with whatever is told of the servers."""
        return self.controller.revision + self._adapting.revision

    def shown(self, now: float) -> list[wire.PolicyServer]:
        """All servers, as workers and people see them."""
        return self._adapting.shown(self.controller.shown(now))

    def wake(self) -> None:
        """Something happened that may concern the servers."""
        self._news.set()

    async def run(self) -> None:
        """Watch until the run is closed."""
        try:
            while not self._shell.core.closed(self._run):
                self._news.clear()
                if self._broken is not None:
                    raise self._broken
                await self._step()
                now = self._shell.now()
                found = (self.controller.due(now), self._discovery.due(), self._adapting.due())
                dues = [due for due in found if due is not None]
                timeout_s = max(0.0, min(dues) - now) if dues else None
                await _until(self._news, timeout_s)
            await asyncio.gather(*self._calls)  # each has its own end
            await self._adapting.leave()
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            let_go = [self._control.carry_out(call) for call in self.controller.let_go()]
            await asyncio.gather(*let_go, return_exceptions=True)

    async def _step(self) -> None:
        controller, core, now = self.controller, self._shell.core, self._shell.now()
        hosting = core.hosting(self._run)
        hold_s, holders = core.sync_hold(self._run, now)
        self._take_servers()
        target = (None, None) if self._adapting.trains else (hosting.target, hosting.weights)
        controller.take_target(Target(*target, hosting.held, (holders[0] if holders else "", hold_s)))
        for call in controller.step(now):
            self._begin(self._carry_out(call))
        for name in self._discovery.step(now):
            self._begin(self._look_up(name))
        if self._adapting.any:
            for change in self._adapting.step(controller.servers, held=hold_s > 0):
                self._begin(self._adapt(change))
        self._count()
        reasons = controller.reasons()
        core.tell_servers(self._run, reasons + self._discovery.reasons() + self._adapting.reasons())
        self.sync = " ".join(reason.message for reason in reasons if reason.code == "weight-sync")
        if self.revision != self._told:
            self._told = self.revision
            self._shell.bells.of_servers(self._run).ring_all()
        await self._served(hosting)

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and call.exception() is not None:
            self._broken = call.exception()  # the watch ends with it, and begins anew
            self.wake()

    def _take_servers(self) -> None:
        """The servers that the run has now, and how many episodes they take."""
        core, servers = self._shell.core, self.controller.servers
        given = core.hosting(self._run).servers
        ejected = {server.address for server in servers.values() if server.state == "ejected"}
        self._discovery.take_servers(given)
        self.controller.take_servers(self._discovery.servers(given, ejected, self._shell.now()))
        self._meter.take_servers(servers.values(), core.leased(self._run))
        self._cap()

    def _cap(self) -> None:
        if self._shell.core.set_inference_slots(self._run, self._meter.attainable):
            self._shell.bells.offer_work()

    async def _served(self, hosting: Hosting) -> None:
        version, weights = hosting.target, hosting.weights
        if version is None or weights is None or version == hosting.held or not self.controller.newest_served:
            return
        try:
            await self._shell.do(lambda now: self._shell.core.weights_served(self._run, version, weights, now))
        except StoreError as error:
            log.error("it could not be stored that new weights are served", run=self._run, problem=error.detail)
        else:
            log.info("new weights are served", run=self._run, version=str(version))

    def _count(self) -> None:
        metrics, label = self._metrics, self._metrics.run_label(self._run)
        for event in self.controller.events():
            if isinstance(event, Resumed):
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

    async def _carry_out(self, call: Call) -> None:
        if call.kind == "probe":
            await self._probe(call.address)
        else:
            problem = await self._control.carry_out(call)
            self.controller.answered(call, problem, self._shell.now())
            self.wake()

    async def _probe(self, address: str) -> None:
        seen = await self._control.probe(address)
        if self._adapting.any and not seen.problem:
            await self._adapting.look(address)
            await self._adapting.tell_served()
        self.controller.probed(address, seen, self._shell.now())
        self.wake()
        if not seen.problem and address not in self._measuring:
            await self._measure(address)

    async def _measure(self, address: str) -> None:
        self._measuring.add(address)
        try:
            reading = await self._control.read_metrics(address)
        finally:
            self._measuring.discard(address)
        self.controller.measured(address, reading)
        self._adapting.measured(reading)
        server = self.controller.servers.get(address)
        if server is not None:
            self._meter.measured(server, reading, self._shell.core.leased(self._run))
            self._cap()

    async def _adapt(self, change: AdapterCall) -> None:
        await self._adapting.carry_out(change)
        await self._adapting.tell_served()
        self.wake()

    async def _look_up(self, name: str) -> None:
        await look_up(name, self._discovery, self._resolver, self._shell.now)
        self.wake()


async def _until(event: asyncio.Event, timeout_s: float | None) -> None:
    """Until the event is set, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return

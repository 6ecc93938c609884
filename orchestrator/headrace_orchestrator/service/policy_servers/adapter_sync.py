"""Adapter sync of one run: carries out the decisions of ``policy_servers.adapters`` at its servers.

* A server that lacks an adapter in use is shown as ejected, with the missing adapter.
* A version of the trained adapter is served once the first server has it.
* Faulty files of an adapter are found before a server is asked, and tensors that do not fit before it loads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from headrace.errors import StoreError
from headrace.server import logs
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.policy_servers import adapter_files
from headrace_orchestrator.policy_servers.adapters import AdapterCall, Adapters
from headrace_orchestrator.policy_servers.admission import Load, Reading
from headrace_orchestrator.policy_servers.calls import NotChecked, PolicyServerCalls
from headrace_orchestrator.policy_servers.server_state import CallProblem
from headrace_orchestrator.scheduler.commands.policy_servers import weights_served
from headrace_orchestrator.service.shell import Shell

log = logs.logger(__name__)


class AdapterSync:
    """The adapters of one run at its servers."""

    def __init__(self, run: str, shell: Shell, calls: PolicyServerCalls) -> None:
        self._run = run
        self._shell = shell
        self._calls = calls
        self._spec = shell.run(run).spec.policy
        self._adapters = Adapters(run, self._spec)
        self._loaded_path = ""

    @property
    def has_adapters(self) -> bool:
        """Return True if the run has adapters."""
        return self._adapters.has_adapters

    @property
    def trains(self) -> bool:
        """Return True if the run trains an adapter."""
        return self._spec.adapter is not None

    @property
    def revision(self) -> int:
        """The revision of the adapters' states, which grows with each change."""
        return self._adapters.revision

    def due(self) -> float | None:
        """Time of the next step if nothing wakes the watch before."""
        return self._adapters.due()

    def step(self, servers: Collection[str], *, held: bool) -> list[AdapterCall]:
        """The calls to make now, at these servers. ``held``: an evaluation holds the version that is served."""
        run, adapters = self._shell.run(self._run), self._adapters
        state = run.policy_servers
        if state.loaded is not None and state.loaded.kind == "adapter":
            adapters.announce(state.held, state.loaded.path, state.loaded.digest)
            adapters.record_served(state.held)
        if state.target is not None and state.weights is not None and self.trains and not held:
            adapters.announce(state.target, state.weights.path, state.weights.digest)
        self._loaded_path = state.loaded.path if state.loaded is not None else ""
        adapters.use({name for group in run.open_groups.values() for name in group.adapters.values()})
        adapters.take_servers(servers)
        return adapters.step(self._shell.now())

    async def carry_out(self, call: AdapterCall) -> None:
        """Make a call, and record its result."""
        problem = await (self._load(call) if call.kind == "load" else self._change(call))
        self._adapters.take_result(call, problem, self._shell.now())
        facts = {"run": self._run, "server": call.address, "name": call.name}
        if problem is not None:
            log.warning("an adapter was not taken", **facts, kind=problem.kind, problem=problem.message)
        else:
            log.info(f"adapter {call.kind}ed", **facts)

    async def _load(self, call: AdapterCall) -> CallProblem | None:
        """Load an adapter whose files fit, and are the same before and after the load."""
        problem = await self._problem_of_files(call) or await self._change(call)
        if problem is None and call.digest:
            problem = await self._problem_of_files(call)
            if problem is not None:
                await self._change(call._replace(kind="unload"))
        return problem

    async def _change(self, call: AdapterCall) -> CallProblem | None:
        refusal = await self._calls.change_adapter(call.address, call.kind, call.name, call.path)
        return CallProblem("adapter-refused", refusal, untouched=True) if refusal else None

    async def _problem_of_files(self, call: AdapterCall) -> CallProblem | None:
        """The problem of an adapter's files, if any. The server knows best what it can take."""
        before = self._loaded_path if "@" in call.name else ""  # only the trained adapter has versions
        problem = await asyncio.to_thread(adapter_files.adapter_problem, call.path, before)
        if problem is not None:
            return problem
        try:
            weights = messages.Weights(path=call.path, kind="adapter", digest=call.digest)
            return await self._calls.check_adapter(call.address, weights)
        except NotChecked as error:
            facts = {"run": self._run, "server": call.address, "name": call.name}
            log.warning("the server cannot check an adapter's tensors", **facts, reason=str(error))
            return await asyncio.to_thread(adapter_files.unchecked_problem, call.path, call.digest)

    async def leave(self) -> None:
        """Unload the run's adapters from the servers that answer, at the end of the run."""
        await asyncio.gather(*(self.carry_out(call) for call in self._adapters.closing_calls()))

    async def list_at(self, address: str) -> None:
        """List the adapters of a server."""
        calls = self._adapters.calls_before_list(address)
        if calls is None:
            return  # an adapter that is being loaded may be unloaded again
        loaded = await self._calls.list_adapters(address)
        if self._adapters.calls_before_list(address) == calls:
            self._adapters.take_list(address, loaded)

    def take_reading(self, reading: Reading) -> None:
        """Take a server's limit of adapters; the lowest limit counts."""
        if isinstance(reading, Load) and reading.max_adapters:
            known = self._adapters.limit
            self._adapters.limit = reading.max_adapters if known is None else min(known, reading.max_adapters)

    def complete(self, servers: Sequence[messages.PolicyServerStatus]) -> list[messages.PolicyServerStatus]:
        """The servers' states completed with the version of the trained adapter and with missing adapters."""
        return [self._completed(server) for server in servers] if self.has_adapters else list(servers)

    def _completed(self, server: messages.PolicyServerStatus) -> messages.PolicyServerStatus:
        if self._spec.adapter:
            server = msgspec.structs.replace(server, version=str(self._adapters.version(server.address)))
        missing = self._adapters.missing_reason(server.address)
        if missing and server.state in ("serving", "unknown"):
            server = msgspec.structs.replace(server, state="ejected", reason=missing)
        return server

    def reasons(self) -> list[messages.Reason]:
        """The reasons that adapters are missing at servers."""
        return self._adapters.reasons()

    async def record_served(self) -> None:
        """Store that a version of the trained adapter is served."""
        servers, version = self._shell.run(self._run).policy_servers, self._adapters.served
        weights = servers.weights
        if version != servers.target or version == servers.held or weights is None or weights.kind != "adapter":
            return
        await store_served(self._shell, self._run, version, weights)


async def store_served(shell: Shell, run: str, version: Version, weights: messages.Weights) -> None:
    """Store that a run's servers take requests with these weights; a failure of the store is logged."""
    try:
        await shell.execute(lambda state, now: weights_served(state, state.run(run), version, weights, now))
    except StoreError as error:
        log.error("the version that is served could not be stored", run=run, problem=error.detail)
    else:
        log.info("new weights are served", run=run, version=str(version))

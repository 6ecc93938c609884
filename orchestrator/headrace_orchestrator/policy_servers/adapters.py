"""The LoRA adapters that a run's servers should hold, and the calls that load and unload them. Pure.

* Every server holds pinned adapters, those of open groups, and the trained adapter's served, next and previous
  versions. Turns that have just begun use the previous one.
* The remaining room goes to the other adapters, most recently used first.
* Each version of the trained adapter has its own name at the servers, and never replaces another one: vLLM would read
  it from disk again at every step, and could restore an older version while a request of that one is running.
* Once a version is served, servers without it get no requests.
* Adapters of other owners are left alone: the names of the run's own adapters begin with the run's name.
* A restarted server gets its adapters again.
* A refused load is retried with growing delays, and its reason stays visible; a new version is loaded at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headrace.runspec import PolicySpec
from headrace.trajectory import Version
from headrace.wire.messages import Reason
from headrace.wire.policy_server import adapter_server_name
from headrace_orchestrator.policy_servers.server_state import CallProblem, retry_delay_s

BASE = Version(0, 0)
"""The version of a run's trained adapter before its first load: the base model alone."""


class AdapterCall(NamedTuple):
    """A call to a server: load the adapter in folder ``path`` under ``name``, or unload ``name``. ``digest``: that of
    its files, if known."""

    kind: Literal["load", "unload"]
    address: str
    name: str
    path: str = ""
    digest: str = ""


@dataclass
class _AdapterServer:
    #: Folders of its adapters by name; None if unknown.
    loaded: dict[str, str] | None = None
    call_pending: bool = False
    #: Calls made so far.
    calls: int = 0
    problem: CallProblem | None = None
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class Adapters:
    """The adapters of one run. ``limit``: the number of adapters that a server runs at a time, if known."""

    run: str
    spec: PolicySpec
    limit: int | None = None
    revision: int = 0
    _versions: dict[Version, str] = field(default_factory=dict)
    #: Digests of the trained adapter's files, by its name at the servers.
    _digests: dict[str, str] = field(default_factory=dict)
    #: The newest version that a server has had.
    served: Version = BASE
    _previously_served: Version = BASE
    _servers: dict[str, _AdapterServer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths = {self._at_server(adapter.name): adapter.path for adapter in self.spec.adapters}
        self._pinned = {self._at_server(adapter.name) for adapter in self.spec.adapters if adapter.pinned}
        #: Names of the frozen adapters at the servers, most recently used last.
        self._recency = [self._at_server(adapter.name) for adapter in reversed(self.spec.adapters)]
        self._in_use: set[str] = set()

    @property
    def has_adapters(self) -> bool:
        """Return True if the run has adapters."""
        return bool(self.spec.adapter or self._paths)

    # Input ---------------------------------------------------------------------------------------------------

    def announce(self, version: Version, path: str, digest: str = "") -> None:
        """Take a new version of the trained adapter, which is in folder ``path``."""
        self._digests[self._name(version)] = digest
        if self._versions.get(version) != path:
            self._versions[version] = path
            self._drop_versions_except({version})
            for server in self._servers.values():
                server.failures, server.retry_at = 0, 0.0

    def _drop_versions_except(self, versions: set[Version]) -> None:
        keep = versions | {self.served, self._previously_served}
        self._versions = {version: path for version, path in self._versions.items() if version in keep}
        names = {self._name(version) for version in self._versions}
        self._digests = {name: digest for name, digest in self._digests.items() if name in names}

    def use(self, in_use: Collection[str]) -> None:
        """Set the frozen adapters that open groups use."""
        names = {self._at_server(name) for name in in_use}
        for name in sorted(names - self._in_use):
            self._recency.remove(name)
            self._recency.append(name)
        self.revision += names != self._in_use
        self._in_use = names

    def take_servers(self, addresses: Iterable[str]) -> None:
        """Take the addresses of the run's current servers."""
        self._servers = {address: self._servers.get(address) or _AdapterServer() for address in addresses}

    def calls_before_list(self, address: str) -> int | None:
        """The number of calls to a server before its adapters are listed; None while a call has no result."""
        server = self._servers.get(address)
        return None if server is None or server.call_pending else server.calls

    def take_list(self, address: str, loaded: Mapping[str, str] | None) -> None:
        """Take the adapters that a server lists, as folders by name; None if it did not answer."""
        server = self._servers.get(address)
        if server is not None and server.loaded != loaded:
            server.loaded = None if loaded is None else dict(loaded)
            self._update_served()

    def take_result(self, call: AdapterCall, problem: CallProblem | None, now: float) -> None:
        """Take the result of a call; ``problem`` is None on success."""
        server = self._servers.get(call.address)
        if server is None:
            return
        server.call_pending = False
        self.revision += server.problem != problem
        server.problem = problem
        if problem is not None:
            server.retry_at = now + retry_delay_s(server.failures)
            server.failures += 1
            return
        server.failures = 0
        if server.loaded is not None and call.kind == "load":
            server.loaded[call.name] = call.path
        elif server.loaded is not None:
            server.loaded.pop(call.name, None)
        self._update_served()

    def _update_served(self) -> None:
        self.revision += 1
        newest = max((self.version(address) for address in self._servers), default=BASE)
        if newest > self.served:
            self.record_served(newest)

    def record_served(self, version: Version) -> None:
        """Record that a server has this version, or had it before this process started."""
        if version > self.served:
            self.served, self._previously_served = version, self.served
            self._drop_versions_except({version for version in self._versions if version > self.served})

    # Calls ----------------------------------------------------------------------------------------------------

    def desired(self) -> dict[str, str]:
        """The adapters that every server should hold, as folders by name."""
        desired = self._mandatory()
        for name in reversed(self._recency):
            if name not in desired and (self._limit is None or len(desired) < self._limit):
                desired[name] = self._paths[name]
        return desired

    @property
    def _limit(self) -> int | None:
        return self.limit if self.spec.max_adapters is None else self.spec.max_adapters

    def _mandatory(self) -> dict[str, str]:
        """The adapters that every server should hold even beyond its limit."""
        trained = {self._name(version): path for version, path in self._versions.items()}
        return trained | {name: self._paths[name] for name in self._recency if name in self._pinned | self._in_use}

    def _name(self, version: Version) -> str:
        return self._at_server(self.spec.adapter or "", version)

    def _at_server(self, name: str, version: Version | None = None) -> str:
        return adapter_server_name(self.run, name, version)

    def step(self, now: float) -> list[AdapterCall]:
        """The calls to make now, at most one for each server that has no pending call."""
        desired, calls = self.desired(), []
        for address, server in self._servers.items():
            call = None if server.call_pending or server.retry_at > now else self._next(address, server, desired)
            if call is not None:
                server.call_pending = True
                server.calls += 1
                calls.append(call)
        return calls

    def _next(self, address: str, server: _AdapterServer, desired: Mapping[str, str]) -> AdapterCall | None:
        if server.loaded is None:
            return None
        for name, path in server.loaded.items():
            if self._is_own(name) and desired.get(name) != path:
                return AdapterCall("unload", address, name)
        for name, path in desired.items():
            if name not in server.loaded:
                return AdapterCall("load", address, name, path, self._digests.get(name, ""))
        return None

    def _is_own(self, name: str) -> bool:
        return name.startswith(self._at_server(""))

    def closing_calls(self) -> list[AdapterCall]:
        """The calls that unload the run's own adapters when it ends."""
        return [
            AdapterCall("unload", address, name)
            for address, server in self._servers.items()
            for name in server.loaded or ()
            if self._is_own(name)
        ]

    def due(self) -> float | None:
        """The time of the next attempt at a failed call; None without one."""
        return min((server.retry_at for server in self._servers.values() if server.problem is not None), default=None)

    # Status ---------------------------------------------------------------------------------------------------

    def version(self, address: str) -> Version:
        """The newest version of the trained adapter at a server; ``BASE`` without one."""
        loaded = self._loaded_at(address)
        return max((version for version in self._versions if self._name(version) in loaded), default=BASE)

    def missing_reason(self, address: str) -> str:
        """The reason that a server gets no requests: a missing adapter. Empty if it has all that it needs."""
        loaded = self._loaded_at(address)
        missing = [name for name in self._needed() if name not in loaded]
        if not missing:
            return ""
        problem = self._servers[address].problem if address in self._servers else None
        return f"it does not have adapter {missing[0]} yet{f': {problem.message}' if problem is not None else ''}"

    def _loaded_at(self, address: str) -> Mapping[str, str]:
        server = self._servers.get(address)
        return {} if server is None or server.loaded is None else server.loaded

    def _needed(self) -> list[str]:
        """The names of the served version, and of the frozen adapters that are used or pinned."""
        needed = [self._name(self.served)] if self.served != BASE else []
        return needed + [name for name in self._recency if name in self._pinned | self._in_use]

    def reasons(self) -> list[Reason]:
        """The reasons for which adapters are missing at servers."""
        reasons = [
            Reason(
                code="adapters",
                message=f"{address} could not take an adapter: {server.problem.message}",
                facts={"server": address, "kind": server.problem.kind},
            )
            for address, server in self._servers.items()
            if server.problem is not None
        ]
        mandatory = self._mandatory()
        if self._limit is not None and len(mandatory) > max(self._limit, 2 if self._versions else 0):
            reasons.append(
                Reason(
                    code="adapters",
                    message=(
                        f"{len(mandatory)} adapters are in use or pinned, but a server runs only {self._limit} at a "
                        "time, so requests wait for each other. Start the servers with a larger --max-loras, or use "
                        "fewer adapters."
                    ),
                    facts={"in_use": len(mandatory), "limit": self._limit},
                )
            )
        return reasons

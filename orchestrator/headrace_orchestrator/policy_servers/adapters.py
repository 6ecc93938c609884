"""The LoRA adapters that the servers of a run should hold, and the calls that load and unload them. Pure.

* Every server holds the served version of the trained adapter, the next one, and the one before (for turns that just
  began); pinned adapters; and the adapters of open groups.
* Remaining room goes to the other adapters, most recently used first.
* A version of the trained adapter has its own name at the servers, and never replaces another one: vLLM would read it
  from disk again at every step, and could restore an older one while a request of that one is running.
* Once a version was served, servers without it are not asked.
* Adapters of others are not touched: the run's own adapters have names that begin with the run's.
* A restarted server gets its adapters again.
* A refused load is retried with growing delays; the first reason stays visible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headrace.runspec import PolicySpec
from headrace.trajectory import Version
from headrace.wire.messages import Reason
from headrace.wire.policy_server import adapter_server_name

RETRY_FIRST_S = 1.0
RETRY_MOST_S = 30.0
"""Longest pause between tries to load a refused adapter."""


BASE = Version(0, 0)
"""The version of a run's trained adapter before its first load: the base alone."""


class AdapterCall(NamedTuple):
    """A call to a server: ``load`` a folder under a name, or ``unload`` the name."""

    kind: Literal["load", "unload"]
    address: str
    name: str
    path: str = ""


@dataclass
class _Server:
    #: Adapters that it has, by name, and where each came from; None while nobody knows.
    has: dict[str, str] | None = None
    busy: bool = False
    problem: str = ""
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class Adapters:
    """The adapters of one run. ``limit``: the number that a server runs at a time, if known."""

    run: str
    spec: PolicySpec
    limit: int | None = None
    revision: int = 0
    #: Frozen ones, as the servers know them, in the order of their last use, latest last.
    _order: list[str] = field(default_factory=list)
    _versions: dict[Version, str] = field(default_factory=dict)
    #: The newest version that a server had; 0.0 is the base alone.
    served: Version = BASE
    _served_before: Version = BASE
    _servers: dict[str, _Server] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths = {self._at_server(adapter.name): adapter.path for adapter in self.spec.adapters}
        self._pinned = {self._at_server(adapter.name) for adapter in self.spec.adapters if adapter.pinned}
        self._order = [self._at_server(adapter.name) for adapter in reversed(self.spec.adapters)]
        self._in_use: set[str] = set()

    @property
    def any(self) -> bool:
        """Return True if the run has adapters."""
        return bool(self.spec.adapter or self._paths)

    # What happened --------------------------------------------------------------------------------------------

    def announced(self, version: Version, path: str) -> None:
        """Take a version of the trained adapter and its folder."""
        if self._versions.get(version) != path:
            self._versions[version] = path
            self._forget({version})
            for server in self._servers.values():
                server.failures, server.retry_at = 0, 0.0

    def _forget(self, wanted: set[Version]) -> None:
        keep = wanted | {self.served, self._served_before}
        self._versions = {version: path for version, path in self._versions.items() if version in keep}

    def use(self, in_use: Collection[str]) -> None:
        """Set the frozen adapters of the open groups."""
        now = {self._at_server(name) for name in in_use}
        for name in sorted(now - self._in_use):
            self._order.remove(name)
            self._order.append(name)
        self.revision += now != self._in_use
        self._in_use = now

    def take_servers(self, addresses: Iterable[str]) -> None:
        """Set the run's servers."""
        self._servers = {address: self._servers.get(address) or _Server() for address in addresses}

    def listed(self, address: str, has: Mapping[str, str] | None) -> None:
        """Take the adapters that a server lists; None if it did not answer."""
        server = self._servers.get(address)
        if server is not None and server.has != has:
            server.has = None if has is None else dict(has)
            self._news()

    def answered(self, call: AdapterCall, problem: str, now: float) -> None:
        """Take the result of a call; ``problem`` is empty on success."""
        server = self._servers.get(call.address)
        if server is None:
            return
        server.busy = False
        self.revision += server.problem != problem
        server.problem = problem
        if problem:
            server.retry_at = now + min(RETRY_MOST_S, RETRY_FIRST_S * 2**server.failures)
            server.failures += 1
            return
        server.failures = 0
        if server.has is not None and call.kind == "load":
            server.has[call.name] = call.path
        elif server.has is not None:
            server.has.pop(call.name, None)
        self._news()

    def _news(self) -> None:
        self.revision += 1
        newest = max((self.version(address) for address in self._servers), default=BASE)
        if newest > self.served:
            self.is_served(newest)

    def is_served(self, version: Version) -> None:
        """Record that a server has, or had before this process, this version."""
        if version > self.served:
            self.served, self._served_before = version, self.served
            self._forget({version for version in self._versions if version > self.served})

    # What to do -----------------------------------------------------------------------------------------------

    def keep(self) -> dict[str, str]:
        """The adapters that every server should hold: folders by name at the server."""
        always = self._always()
        kept = dict(always)
        for name in reversed(self._order):
            if name not in kept and (self._limit is None or len(kept) < self._limit):
                kept[name] = self._paths[name]
        return kept

    @property
    def _limit(self) -> int | None:
        return self.limit if self.spec.max_adapters is None else self.spec.max_adapters

    def _always(self) -> dict[str, str]:
        trained = {self._name(version): path for version, path in self._versions.items()}
        return trained | {name: self._paths[name] for name in self._order if name in self._pinned | self._in_use}

    def _name(self, version: Version) -> str:
        return self._at_server(self.spec.adapter or "", version)

    def _at_server(self, name: str, version: Version | None = None) -> str:
        return adapter_server_name(self.run, name, version)

    def step(self, now: float) -> list[AdapterCall]:
        """The calls to make now, at most one for each server; a call is out until it is answered."""
        kept, calls = self.keep(), []
        for address, server in self._servers.items():
            call = None if server.busy or server.retry_at > now else self._next(address, server, kept)
            if call is not None:
                server.busy = True
                calls.append(call)
        return calls

    def _next(self, address: str, server: _Server, kept: Mapping[str, str]) -> AdapterCall | None:
        if server.has is None:
            return None
        for name, path in server.has.items():
            if self._is_ours(name) and kept.get(name) != path:
                return AdapterCall("unload", address, name)
        for name, path in kept.items():
            if name not in server.has:
                return AdapterCall("load", address, name, path)
        return None

    def _is_ours(self, name: str) -> bool:
        return name.startswith(self._at_server(""))

    def leave(self) -> list[AdapterCall]:
        """The calls at the end of the run, which unload its own adapters."""
        return [
            AdapterCall("unload", address, name)
            for address, server in self._servers.items()
            for name in server.has or ()
            if self._is_ours(name)
        ]

    def due(self) -> float | None:
        """The time of the next check, if nothing happens before."""
        return min((server.retry_at for server in self._servers.values() if server.problem), default=None)

    # What to tell ---------------------------------------------------------------------------------------------

    def version(self, address: str) -> Version:
        """The newest version of the trained adapter at a server; 0.0, the base alone, if none."""
        has = self._has(address)
        return max((version for version in self._versions if self._name(version) in has), default=BASE)

    def lacks(self, address: str) -> str:
        """The reason that a server gets no requests: an adapter that it lacks. Empty if it has all."""
        has = self._has(address)
        missing = [name for name in self._needed() if name not in has]
        if not missing:
            return ""
        problem = self._servers[address].problem if address in self._servers else ""
        return f"it does not have adapter {missing[0]} yet{f': {problem}' if problem else ''}"

    def _has(self, address: str) -> Mapping[str, str]:
        server = self._servers.get(address)
        return {} if server is None or server.has is None else server.has

    def _needed(self) -> list[str]:
        """The served version, and the frozen adapters that are used or pinned."""
        needed = [self._name(self.served)] if self.served != BASE else []
        return needed + [name for name in self._order if name in self._pinned | self._in_use]

    def reasons(self) -> list[Reason]:
        """The reasons that adapters are missing at servers."""
        found = [
            Reason(
                code="adapters",
                message=f"{address} could not take an adapter: {server.problem}",
                facts={"server": address},
            )
            for address, server in self._servers.items()
            if server.problem
        ]
        always = self._always()
        if self._limit is not None and len(always) > max(self._limit, 2 if self._versions else 0):
            found.append(
                Reason(
                    code="adapters",
                    message=(
                        f"{len(always)} adapters are in use or pinned and a server runs {self._limit} at a time: "
                        "requests wait for each other. Start it with a larger --max-loras, or play with fewer adapters."
                    ),
                    facts={"in_use": len(always), "limit": self._limit},
                )
            )
        return found

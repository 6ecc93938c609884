"""Pools of policy servers: the servers that accept requests now, and the durations of their pauses.

* A fixed pool has the servers of a spec or a command line; all accept requests, and none is ever paused.
* A managed pool follows the orchestrator's list: servers that are paused, drained or ejected get no new requests.
* Until the orchestrator answers, a managed pool has no servers. If the orchestrator manages none for the run, or is
  unavailable from the start, the servers of the spec get all requests.
* The version of a trained adapter at a server is the one that the orchestrator observed; its name there contains it.
* The length of a pause is the orchestrator's own count plus the time since its last answer. A restarted orchestrator
  may start its count again.
* A pause without an update for a while counts as ended: a paused server delays requests itself, and reports the weights
  of each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.errors import PolicyFailure
from headrace.trajectory import Version
from headrace.wire.messages import PolicyServersReply, PolicyServerStatus
from headrace.wire.policy_server import DNS_PREFIX, adapter_server_name, base_url

BASE = Version(0, 0)
"""The version of a trained adapter before its first load: the base alone."""

STALE_S = 120.0
"""Time without an answer of the orchestrator after which its states are stale. A pause does not outlast its lease."""


class ServerPool(Protocol):
    """The servers of a policy."""

    @property
    def name(self) -> str:
        """The pool's unique name."""
        ...

    def addresses(self) -> Sequence[str]:
        """The servers that accept requests now."""
        ...

    def all_addresses(self) -> set[str]:
        """Every server of the pool, in any state."""
        ...

    def paused_s(self, address: str) -> float:
        """Seconds that a server has been paused for new weights so far."""
        ...

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        """Name and version of the run's trained adapter at a server; the name is empty if it has only the base. Raises
        PolicyFailure."""
        ...

    def all_paused_s(self) -> float:
        """Seconds in which no server accepted requests because of pauses for new weights."""
        ...

    async def changed(self) -> None:
        """Wait until ``addresses`` may have changed."""
        ...

    def unavailable_reason(self) -> str:
        """The reason why no server accepts requests."""
        ...


class FixedPool:
    """A fixed list of servers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.name = " ".join(addresses)
        self._addresses = list(addresses)

    def addresses(self) -> Sequence[str]:
        return self._addresses

    def all_addresses(self) -> set[str]:
        return set(self._addresses)

    def paused_s(self, address: str) -> float:
        return 0.0

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        raise _unknown_version(address, name)

    def all_paused_s(self) -> float:
        return 0.0

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def unavailable_reason(self) -> str:
        return ""


class ManagedPool:
    """The servers of a run, as the orchestrator lists them. ``spec_servers``: the servers of the run's spec."""

    def __init__(self, run: str, spec_servers: Sequence[str], clock: Callable[[], float]) -> None:
        self.name = f"run {run}"
        self._run = run
        # Only the orchestrator resolves DNS names of several servers.
        self._spec_servers = [server for server in spec_servers if not server.startswith(DNS_PREFIX)]
        self._clock = clock
        self._servers: dict[str, PolicyServerStatus] = {}
        self._earlier_pauses_s: dict[str, float] = {}
        self._accepting: list[str] = []
        self._updated_at: float | None = None
        self._all_paused_since: float | None = None
        self._all_paused_s = 0.0
        self._change = asyncio.Event()

    def update(self, reply: PolicyServersReply) -> None:
        """Apply the orchestrator's current list."""
        if not reply.revision and not reply.servers:
            self.mark_unreachable()  # it manages no servers of this run
            return
        # A removed server may still answer; its pauses are over.
        servers = {base_url(server.address): server for server in reply.servers}
        for name, server in servers.items():
            if name in self._servers and server.paused_s < self._servers[name].paused_s:
                self._earlier_pauses_s[name] = self.paused_s(name) - server.paused_s  # its count started again
        self._servers = servers
        self._updated_at = self._clock()
        self._set_accepting([name for name, server in self._servers.items() if server.state in ("serving", "unknown")])

    def mark_unreachable(self) -> None:
        """Record that the orchestrator did not answer."""
        if self._updated_at is None:
            self._set_accepting(self._spec_servers)
        elif self._clock() - self._updated_at > STALE_S:
            states = ("serving", "unknown", "syncing")
            self._set_accepting([name for name, server in self._servers.items() if server.state in states])

    def addresses(self) -> Sequence[str]:
        return self._accepting

    def all_addresses(self) -> set[str]:
        return {*self._spec_servers, *self._servers}

    def ejected(self) -> list[str]:
        """The servers that get no requests until they confirm a current version."""
        return [name for name, server in self._servers.items() if server.state == "ejected"]

    def paused_s(self, address: str) -> float:
        server = self._servers.get(address)
        if server is None or self._updated_at is None:
            return 0.0
        since_s = min(self._clock() - self._updated_at, STALE_S) if server.state == "syncing" else 0.0
        return self._earlier_pauses_s.get(address, 0.0) + server.paused_s + since_s

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        server = self._servers.get(address)
        if server is None or not server.version:
            raise _unknown_version(address, name)
        version = Version.parse(server.version)
        return "" if version == BASE else adapter_server_name(self._run, name, version), version

    def all_paused_s(self) -> float:
        now_s = 0.0 if self._all_paused_since is None else self._clock() - self._all_paused_since
        return self._all_paused_s + now_s

    async def changed(self) -> None:
        await self._change.wait()

    def unavailable_reason(self) -> str:
        if self._updated_at is None:
            return "The orchestrator has not listed the servers of the run."
        states = [
            f"{name} is {server.state}" + (f" ({server.reason})" if server.reason else "")
            for name, server in self._servers.items()
        ]
        return f"{'; '.join(states) or 'The run has no policy server'}. `headrace servers` lists them."

    def _set_accepting(self, accepting: list[str]) -> None:
        all_paused = not accepting and any(server.state == "syncing" for server in self._servers.values())
        if all_paused and self._all_paused_since is None:
            self._all_paused_since = self._clock()
        elif not all_paused and self._all_paused_since is not None:
            self._all_paused_s, self._all_paused_since = self.all_paused_s(), None
        self._accepting = accepting
        self._change.set()
        self._change = asyncio.Event()


def _unknown_version(address: str, adapter: str) -> PolicyFailure:
    return PolicyFailure(
        f"The version of adapter {adapter} at {address} is unknown.",
        hint="The orchestrator reports it for servers in policy.endpoints: check that it can reach this one.",
        kind="adapter-not-loaded",
        retryable=True,
    )

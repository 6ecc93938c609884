"""Pools of policy servers: which of them take requests now, and how long they were paused.

* A fixed pool has the servers that a spec or a command line names; all take requests, and none is ever paused.
* A managed pool follows the orchestrator's list: servers that are paused, drained or ejected take no new requests.
* Until the orchestrator answers, a managed pool has no servers; if it manages none for the run, or is away from the
  start, the servers that the spec names take all requests.
* The version of a trained adapter at a server is the one that the orchestrator saw there; its name there contains it.
* The length of a pause is the orchestrator's own count plus our clock since its last answer. A restarted orchestrator
  may start its count again.
* A pause without news for a while is taken to be over: a paused server holds requests itself, and names the weights of
  each token.
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

UNHEARD_S = 120.0
"""Time without an answer of the orchestrator after which its states are stale. No pause lasts longer than its lease."""


class ServerPool(Protocol):
    """The servers of a policy."""

    @property
    def name(self) -> str:
        """The pool's unique name."""
        ...

    def addresses(self) -> Sequence[str]:
        """The servers that take requests now."""
        ...

    def all_addresses(self) -> set[str]:
        """Every server of the pool, whatever its state."""
        ...

    def paused_s(self, address: str) -> float:
        """Seconds that a server has been paused for new weights so far."""
        ...

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        """Name and version of the run's trained adapter at a server; the name is empty if it has only the base. Raises
        PolicyFailure."""
        ...

    def held_s(self) -> float:
        """Seconds in which no server took requests because of pauses for new weights."""
        ...

    async def changed(self) -> None:
        """Wait until ``addresses`` may have changed."""
        ...

    def unavailable_reason(self) -> str:
        """The reason that no server takes requests."""
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

    def held_s(self) -> float:
        return 0.0

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def unavailable_reason(self) -> str:
        return ""


class ManagedPool:
    """The servers of a run, as the orchestrator lists them. ``named``: the servers of the run's spec."""

    def __init__(self, run: str, named: Sequence[str], clock: Callable[[], float]) -> None:
        self.name = f"run {run}"
        self._run = run
        #: Without DNS names of several servers: only the orchestrator resolves those.
        self._named = [server for server in named if not server.startswith(DNS_PREFIX)]
        self._clock = clock
        self._servers: dict[str, PolicyServerStatus] = {}
        self._earlier_s: dict[str, float] = {}
        self._takers: list[str] = []
        self._heard_at: float | None = None
        self._hold_began_at: float | None = None
        self._held_s = 0.0
        self._change = asyncio.Event()

    def update(self, reply: PolicyServersReply) -> None:
        """Take the orchestrator's current list."""
        if not reply.revision and not reply.servers:
            self.mark_unreachable()  # it manages no servers of this run
            return
        # A removed server may still answer; its pauses are over.
        servers = {base_url(server.address): server for server in reply.servers}
        for name, server in servers.items():
            if name in self._servers and server.paused_s < self._servers[name].paused_s:
                self._earlier_s[name] = self.paused_s(name) - server.paused_s  # its count started again
        self._servers = servers
        self._heard_at = self._clock()
        self._take([name for name, server in self._servers.items() if server.state in ("serving", "unknown")])

    def mark_unreachable(self) -> None:
        """Record that the orchestrator did not answer."""
        if self._heard_at is None:
            self._take(self._named)
        elif self._clock() - self._heard_at > UNHEARD_S:
            states = ("serving", "unknown", "syncing")
            self._take([name for name, server in self._servers.items() if server.state in states])

    def addresses(self) -> Sequence[str]:
        return self._takers

    def all_addresses(self) -> set[str]:
        return {*self._named, *self._servers}

    def ejected(self) -> list[str]:
        """The servers that take no requests until they confirm a current version."""
        return [name for name, server in self._servers.items() if server.state == "ejected"]

    def paused_s(self, address: str) -> float:
        server = self._servers.get(address)
        if server is None or self._heard_at is None:
            return 0.0
        since_s = min(self._clock() - self._heard_at, UNHEARD_S) if server.state == "syncing" else 0.0
        return self._earlier_s.get(address, 0.0) + server.paused_s + since_s

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        server = self._servers.get(address)
        if server is None or not server.version:
            raise _unknown_version(address, name)
        version = Version.parse(server.version)
        return "" if version == BASE else adapter_server_name(self._run, name, version), version

    def held_s(self) -> float:
        now_s = 0.0 if self._hold_began_at is None else self._clock() - self._hold_began_at
        return self._held_s + now_s

    async def changed(self) -> None:
        await self._change.wait()

    def unavailable_reason(self) -> str:
        if self._heard_at is None:
            return "The orchestrator did not say which servers the run has."
        states = [
            f"{name} is {server.state}" + (f" ({server.reason})" if server.reason else "")
            for name, server in self._servers.items()
        ]
        return f"{'; '.join(states) or 'The run has no policy server'}. `headrace servers` lists them."

    def _take(self, takers: list[str]) -> None:
        holds = not takers and any(server.state == "syncing" for server in self._servers.values())
        if holds and self._hold_began_at is None:
            self._hold_began_at = self._clock()
        elif not holds and self._hold_began_at is not None:
            self._held_s, self._hold_began_at = self.held_s(), None
        self._takers = takers
        self._change.set()
        self._change = asyncio.Event()


def _unknown_version(address: str, adapter: str) -> PolicyFailure:
    return PolicyFailure(
        f"The version of adapter {adapter} at {address} is unknown.",
        hint="The orchestrator knows it for servers in policy.endpoints: check that it reaches this one.",
        kind="adapter-not-loaded",
        retryable=True,
    )

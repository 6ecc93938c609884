"""The servers of one policy: which of them take requests now, and how long they were paused.

* A fixed pool is what a spec or a command line names; all of its servers take requests, and none is ever paused.
* A kept pool is what the orchestrator says: servers that are paused, drained or ejected take nothing new.
* Until the orchestrator was heard, a kept pool takes nothing; if it keeps no list, or is away from the start, what the
  spec names takes all.
* Which version of a trained adapter a server has is what the orchestrator saw there; its name at the server says it.
* A pause is told by the orchestrator's own count of its seconds, and by our clock since that was heard. A restarted
  orchestrator may count anew.
* A pause of which nobody has heard for a while is taken to be over: the server itself holds requests while it is
  paused, and says which weights made what.
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
"""What a trained adapter is before its first version: nothing, added to the base."""

UNHEARD_S = 120.0
"""A pause lasts no longer than its lease, and the orchestrator is back by then."""


class Pool(Protocol):
    """The servers of a policy."""

    @property
    def name(self) -> str:
        """Tells the pool apart from others."""
        ...

    def addresses(self) -> Sequence[str]:
        """The servers that take requests now."""
        ...

    def all_addresses(self) -> set[str]:
        """Every server that the pool knows of."""
        ...

    def paused_s(self, address: str) -> float:
        """Seconds that a server was paused for new weights so far."""
        ...

    def adapter(self, address: str, name: str) -> tuple[str, Version]:
        """What the run's trained adapter is called at a server, in the version that it has there; no name where that
        is the base alone. Raises PolicyFailure."""
        ...

    def held_s(self) -> float:
        """Seconds in which no server took requests since some were paused for new weights."""
        ...

    async def changed(self) -> None:
        """Wait until ``addresses`` may be other ones."""
        ...

    def why(self) -> str:
        """Why no server takes requests."""
        ...


class FixedPool:
    """Servers that stay as they are."""

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

    def why(self) -> str:
        return ""


class KeptPool:
    """The servers of a run, as the orchestrator tells. ``named``: those of the run's spec."""

    def __init__(self, run: str, named: Sequence[str], clock: Callable[[], float]) -> None:
        self.name = f"run {run}"
        self._run = run
        #: Those that are names of several are known to the orchestrator alone.
        self._named = [server for server in named if not server.startswith(DNS_PREFIX)]
        self._clock = clock
        self._servers: dict[str, PolicyServerStatus] = {}
        self._earlier_s: dict[str, float] = {}
        self._takers: list[str] = []
        self._heard_at: float | None = None
        self._hold_began_at: float | None = None
        self._held_s = 0.0
        self._change = asyncio.Event()

    def hear(self, reply: PolicyServersReply) -> None:
        """What the orchestrator says now."""
        if not reply.revision and not reply.servers:
            self.miss()  # it keeps no list of this run
            return
        # A server that left may still answer; its pauses are over.
        servers = {base_url(server.address): server for server in reply.servers}
        for name, server in servers.items():
            if name in self._servers and server.paused_s < self._servers[name].paused_s:
                self._earlier_s[name] = self.paused_s(name) - server.paused_s  # it began to count anew
        self._servers = servers
        self._heard_at = self._clock()
        self._take([name for name, server in self._servers.items() if server.state in ("serving", "unknown")])

    def miss(self) -> None:
        """It could not be heard."""
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
        """The servers that take nothing until they confirm a version that they should have."""
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

    def why(self) -> str:
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
        f"Nobody says which version of adapter {adapter} {address} has.",
        hint="The orchestrator does, of servers that policy.endpoints names: does it reach that one?",
        kind="adapter-not-loaded",
        retryable=True,
    )

"""Decides what becomes of a run's policy servers. Pure: what was seen comes in, calls to make go out.

* Each server is probed on and on; one call at a time is out at a server.
* A server that answers takes requests; one that does not is ejected with the reason, and comes back when it answers.
* A server that drains takes nothing new, whatever it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.wire import PolicyServer, Reason, ServerState
from headrace_orchestrator.policies.admission import Load, Reading
from headrace_orchestrator.policies.server import Seen, Server

PROBE_EVERY_S = 1.0
"""How often a server is asked how it is: a learner waits that long at most for one that is back."""


class Probe(NamedTuple):
    """Ask a server whether it lives, what it holds and whether it is paused."""

    address: str


class Controller:
    """All policy servers of one run. ``revision`` grows whenever what is told of them changes."""

    def __init__(self, revision: int = 0) -> None:
        self.servers: dict[str, Server] = {}
        self.revision = revision

    # What happened --------------------------------------------------------------------------------------------

    def take_servers(self, servers: Mapping[str, bool]) -> None:
        """The servers that the run has now: addresses, and whether each drains."""
        for address in [known for known in self.servers if known not in servers]:
            del self.servers[address]
            self.revision += 1
        for address, drains in servers.items():
            if address not in self.servers:
                self.servers[address] = Server(address)
                self.revision += 1
            server = self.servers[address]
            if server.drains != drains:
                server.drains = drains
                self._judge(server)

    def probed(self, address: str, seen: Seen, now: float) -> None:
        """What a probe found."""
        server = self.servers.get(address)
        if server is None:
            return
        server.busy = ""
        server.probe_at = now + PROBE_EVERY_S
        news = server.seen is None or seen != server.seen
        server.seen = seen
        if not seen.problem:
            server.pause(seen.paused, now)
        self._judge(server, news)

    def measured(self, address: str, reading: Reading) -> None:
        """How busy a server is; no news for those who wait for a change."""
        if address in self.servers and isinstance(reading, Load):
            self.servers[address].load = reading

    # What to do -----------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Probe]:
        """The calls to make now; each is out until its result is told."""
        calls = []
        for server in self.servers.values():
            if not server.busy and server.probe_at <= now:
                server.busy = "probe"
                calls.append(Probe(server.address))
        return calls

    def due(self) -> float | None:
        """When to look again, if nothing happens before."""
        return min((server.probe_at for server in self.servers.values() if not server.busy), default=None)

    # What to tell ---------------------------------------------------------------------------------------------

    def shown(self, now: float) -> list[PolicyServer]:
        """All servers, as workers and people see them."""
        return [server.shown(now) for server in self.servers.values()]

    def reasons(self) -> list[Reason]:
        """Why the servers keep a learner waiting."""
        out = [server for server in self.servers.values() if server.state == "ejected"]
        if not out or len(out) < len(self.servers):
            return []
        told = "; ".join(f"{server.address}: {server.reason}" for server in out)
        return [
            Reason(code="no-policy-servers", message=f"No policy server answers. {told}.", facts={"servers": len(out)})
        ]

    def _judge(self, server: Server, news: bool = False) -> None:
        state, reason = _judged(server)
        if (state, reason) != (server.state, server.reason) or news:
            server.state, server.reason = state, reason
            self.revision += 1


def _judged(server: Server) -> tuple[ServerState, str]:
    if server.seen is None:
        return "unknown", ""
    if server.seen.problem:
        return "ejected", server.seen.problem
    if server.drains:
        return "draining", ""
    return "serving", ""

"""Policy servers found by DNS name: ``dns+http://name:port`` means every address that the name resolves to. Pure.

* A name is looked up periodically, and its servers change with the result.
* A server that vanishes from its name is drained, and forgotten when it stops answering or after a while.
* A failed lookup changes nothing. A name that does not exist has no servers.
* A server that the run also lists by address is not affected by names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.wire.messages import Reason
from headrace.wire.policy_server import DNS_PREFIX

LOOKUP_EVERY_S = 5.0
"""Interval between two lookups of a name: about as long as resolvers cache an answer of Kubernetes' DNS."""

DRAIN_S = 900.0
"""Time for which a vanished server that still answers is kept, so that its open requests can end."""


@dataclass
class _DnsName:
    lookup_at: float = 0.0
    lookup_pending: bool = False
    addresses: list[str] = field(default_factory=list)
    #: Vanished addresses, with the time at which each is forgotten.
    vanished: dict[str, float] = field(default_factory=dict)
    #: The reason that the last lookup found no address; empty if it found one, and before the first lookup.
    problem: str = ""


class Discovery:
    """The DNS names in a run's list of servers, and their addresses."""

    def __init__(self) -> None:
        self._names: dict[str, _DnsName] = {}

    def take_servers(self, servers: Iterable[str]) -> None:
        """Take the run's current list of servers, which has addresses and names."""
        names = [server for server in servers if server.startswith(DNS_PREFIX)]
        self._names = {name: self._names.get(name) or _DnsName() for name in names}

    def due(self) -> float | None:
        """The time of the next lookup."""
        return min((name.lookup_at for name in self._names.values() if not name.lookup_pending), default=None)

    def step(self, now: float) -> list[str]:
        """The names to look up now. A name is not returned again until the result of its lookup is taken."""
        due = [name for name, known in self._names.items() if not known.lookup_pending and known.lookup_at <= now]
        for name in due:
            self._names[name].lookup_pending = True
        return due

    def take_hosts(self, name: str, hosts: Iterable[str], now: float) -> None:
        """Take the IP addresses that a name resolves to; none if the name does not exist."""
        known = self._names.get(name)
        if known is None:
            return
        addresses = sorted({address_at(name, host) for host in hosts})
        for address in known.addresses:
            if address not in addresses:
                known.vanished[address] = now + DRAIN_S
        for address in addresses:
            known.vanished.pop(address, None)
        known.addresses = addresses
        self._finish_lookup(known, "" if addresses else "it resolves to no address", now)

    def take_failure(self, name: str, problem: str, now: float) -> None:
        """Take a failed lookup."""
        if name in self._names:
            self._finish_lookup(self._names[name], problem, now)

    def _finish_lookup(self, known: _DnsName, problem: str, now: float) -> None:
        known.lookup_pending, known.lookup_at, known.problem = False, now + LOOKUP_EVERY_S, problem

    def servers(self, listed: Mapping[str, bool], ejected: Container[str], now: float) -> dict[str, bool]:
        """The addresses of all servers, each with True if it is draining. ``listed``: the run's list, which has
        addresses and names. ``ejected``: the servers that do not answer."""
        resolved = {}
        for name, known in self._names.items():
            for address, until in list(known.vanished.items()):
                if address in ejected or until <= now:
                    del known.vanished[address]
                else:
                    resolved[address] = True
            draining = listed.get(name, True)
            resolved |= {address: draining and resolved.get(address, True) for address in known.addresses}
        return resolved | {server: draining for server, draining in listed.items() if not server.startswith(DNS_PREFIX)}

    def reasons(self) -> list[Reason]:
        """The reasons for which names have no servers."""
        return [
            Reason(
                code="no-policy-servers",
                message=f"No policy server was found at {name}: {known.problem or 'it has not been looked up yet'}.",
                facts={"name": name},
            )
            for name, known in self._names.items()
            if not known.addresses
        ]


def host_of(name: str) -> tuple[str, int]:
    """The host name to look up, and the port of its servers."""
    parts = urlsplit(name)
    return parts.hostname or "", parts.port or 80


def address_at(name: str, host: str) -> str:
    """The address of the name's server at an IP address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{host_of(name)[1]}"

"""Policy servers by name: ``dns+http://name:port`` stands for all addresses that the name resolves to. Pure.

* A name is looked up periodically; its servers come and go with it.
* A server that vanishes from its name is drained, and forgotten when it stops answering or after a while.
* A failed lookup changes nothing. A name that does not exist has no servers.
* A server that is also named by its address is not affected by names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.wire.messages import Reason
from headrace.wire.policy_server import DNS_PREFIX

LOOKUP_EVERY_S = 5.0
"""Between two lookups of a name: as long as a resolver keeps an answer of Kubernetes' DNS, or so."""

DRAIN_S = 900.0
"""A server that vanished from its name and still answers is kept so long, for those who wait for it."""


@dataclass
class _Name:
    look_at: float = 0.0
    looking: bool = False
    addresses: list[str] = field(default_factory=list)
    #: Addresses that vanished, and until when they are kept.
    vanished: dict[str, float] = field(default_factory=dict)
    #: Why the last lookup gave nothing; empty if it gave something, or there was none yet.
    problem: str = ""


class Discovery:
    """The DNS names among a run's servers, and their addresses."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}

    def take_servers(self, servers: Iterable[str]) -> None:
        """The servers that the run has now: addresses, and names."""
        given = [server for server in servers if server.startswith(DNS_PREFIX)]
        self._names = {name: self._names.get(name) or _Name() for name in given}

    def due(self) -> float | None:
        """When the next name is to be looked up."""
        return min((name.look_at for name in self._names.values() if not name.looking), default=None)

    def step(self, now: float) -> list[str]:
        """The names to look up now; each is out until its result is told."""
        due = [name for name, known in self._names.items() if not known.looking and known.look_at <= now]
        for name in due:
            self._names[name].looking = True
        return due

    def found(self, name: str, hosts: Iterable[str], now: float) -> None:
        """Take the result of a lookup: IP addresses; none if the name does not exist."""
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
        self._looked_up(known, "" if addresses else "it resolves to no address", now)

    def failed(self, name: str, problem: str, now: float) -> None:
        """Take a failed lookup."""
        if name in self._names:
            self._looked_up(self._names[name], problem, now)

    def _looked_up(self, known: _Name, problem: str, now: float) -> None:
        known.looking, known.look_at, known.problem = False, now + LOOKUP_EVERY_S, problem

    def servers(self, given: Mapping[str, bool], ejected: Container[str], now: float) -> dict[str, bool]:
        """All servers by address, and whether each drains, of what the run was ``given``: addresses and names with
        whether they drain. ``ejected``: the servers that do not answer."""
        found = {}
        for name, known in self._names.items():
            for address, until in list(known.vanished.items()):
                if address in ejected or until <= now:
                    del known.vanished[address]
                else:
                    found[address] = True
            drains = given.get(name, True)
            found |= {address: drains and found.get(address, True) for address in known.addresses}
        return found | {server: drains for server, drains in given.items() if not server.startswith(DNS_PREFIX)}

    def reasons(self) -> list[Reason]:
        """The reasons about names without servers."""
        return [
            Reason(
                code="no-policy-servers",
                message=f"No policy server is found by {name}: {known.problem or 'it was not looked up yet'}.",
                facts={"name": name},
            )
            for name, known in self._names.items()
            if not known.addresses
        ]


def host_of(name: str) -> tuple[str, int]:
    """The host to look up for a name, and the port of its servers."""
    parts = urlsplit(name)
    return parts.hostname or "", parts.port or 80


def address_at(name: str, host: str) -> str:
    """The address of a server of the name, at an IP address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{host_of(name)[1]}"

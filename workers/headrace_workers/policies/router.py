"""The choice of the policy server for each request: a pure core, with the clock passed in.

* A suspended server gets no request while another is available; if all are suspended, the one whose suspension ends
  first is used.
* An episode stays at its server, and a group at its first episode's, unless that server has more than its share.
* Otherwise the server with the fewest open requests is used, so none has more than ``OVERLOAD`` times its share.
* A server is suspended after several failures in a row, or at once if it cannot be reached, each time for longer.
* A suspended server returns when a request or a probe succeeds; one more failure then suspends it again.

``sent`` opens a request at a server; exactly one of ``answered``, ``failed`` and ``released`` closes it.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

OVERLOAD = 1.5
"""Multiple of the mean of open requests above which a request leaves the server that caches its prefix.
Computing a prefix again costs less than waiting behind half as many requests again."""

FAILURES_IN_A_ROW = 3
"""Failures in a row after which a server is suspended. A single one may be caused by the request or by chance."""

FIRST_SUSPENSION_S = 1.0
"""Duration of the first suspension; it doubles each time."""

LONGEST_SUSPENSION_S = 60.0
"""Longest suspension. A server that loads a large model returns within minutes; a probe per minute is cheap."""

MAX_HOMES = 1 << 16
"""Limit on episodes and groups whose server is remembered; the least recent are forgotten and lose a cached prefix."""


@dataclass(slots=True)
class ServerRecord:
    """The router's state of one server. ``suspended_until``: None while it is available. ``failures_in_a_row`` and
    ``suspensions`` count since its last answer. ``heard_at``: time of its last answer, or of a request while it was
    idle."""

    address: str
    open: int = 0
    requests: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    suspensions: int = 0
    heard_at: float = 0.0
    suspended_until: float | None = None
    reason: str = ""


class ServerRouter:
    """The state of all servers that a worker sends requests to. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.servers: dict[str, ServerRecord] = {}
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def server(self, address: str) -> ServerRecord:
        """The record of a server; a fresh one if it is new."""
        record = self.servers.get(address)
        if record is None:
            record = self.servers[address] = ServerRecord(address)
        return record

    def is_available(self, address: str) -> bool:
        """Return True unless the server is suspended."""
        return self.server(address).suspended_until is None

    def choose(self, pool: Sequence[str], *, policy: str, group: str, episode: str) -> str | None:
        """The server of ``pool`` for the next request of an episode; None if the pool is empty.

        ``policy`` distinguishes the policies of an episode: it has a preferred server for each.
        """
        if len(pool) == 1:
            return pool[0]
        candidates = [self.server(address) for address in pool]
        available = [server for server in candidates if server.suspended_until is None]
        if not available:
            return (
                min(candidates, key=lambda server: (server.suspended_until, server.open)).address
                if candidates
                else None
            )
        chosen = self._home(available, (policy, episode), (policy, group)) or min(
            available, key=lambda server: (server.open, _rank(group, server.address))
        )
        self._set_home((policy, episode), chosen.address)
        if (policy, group) not in self._homes:
            self._set_home((policy, group), chosen.address)
        return chosen.address

    def _home(self, available: list[ServerRecord], *keys: tuple[str, str]) -> ServerRecord | None:
        share = share_of(sum(server.open for server in available), len(available))
        for key in keys:
            home = self._homes.get(key)
            for server in available:
                if server.address == home and server.open < share:
                    self._homes.move_to_end(key)
                    return server
        return None

    def _set_home(self, key: tuple[str, str], address: str) -> None:
        self._homes[key] = address
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    # Outcomes of requests

    def sent(self, address: str) -> None:
        """Record that a request was opened."""
        server = self.server(address)
        if not server.open:
            server.heard_at = self._clock()
        server.open += 1
        server.requests += 1

    def answered(self, address: str) -> None:
        """Record that a request got a valid answer."""
        server = self.server(address)
        server.open -= 1
        server.heard_at = self._clock()
        server.failures_in_a_row = server.suspensions = 0
        server.suspended_until = None
        server.reason = ""

    def released(self, address: str) -> None:
        """Record that a request ended for a reason unrelated to the server."""
        self.server(address).open -= 1

    def failed(self, address: str, reason: str, *, at_once: bool = False) -> None:
        """Record a failure of the server. ``at_once``: suspend it immediately."""
        server = self.server(address)
        server.open -= 1
        server.failures += 1
        server.failures_in_a_row += 1
        if server.suspended_until is None and (at_once or server.failures_in_a_row >= FAILURES_IN_A_ROW):
            self._suspend(server, reason)

    # Probes

    def due_for_probe(self) -> list[str]:
        """The suspended servers that are due for a probe."""
        now = self._clock()
        return [
            server.address
            for server in self.servers.values()
            if server.suspended_until is not None and server.suspended_until <= now
        ]

    def heard(self, address: str) -> None:
        """Record a successful probe of a server with open requests."""
        self.server(address).heard_at = self._clock()

    def silent(self, address: str, problem: str) -> None:
        """Record a failed probe of a server with open requests."""
        server = self.server(address)
        if server.suspended_until is None:
            self._suspend(server, problem)

    def probed(self, address: str, problem: str) -> None:
        """Record the result of probing a suspended server; an empty ``problem`` means healthy."""
        server = self.servers.get(address)
        if server is None:
            return  # the server was removed meanwhile
        if problem:
            self._suspend(server, problem)
        elif server.suspended_until is not None:
            server.suspended_until = None
            server.failures_in_a_row = FAILURES_IN_A_ROW - 1

    def forget_except(self, keep: Collection[str]) -> None:
        """Remove all servers without open requests except these."""
        for address in [name for name, server in self.servers.items() if not server.open and name not in keep]:
            del self.servers[address]

    def _suspend(self, server: ServerRecord, reason: str) -> None:
        server.suspensions += 1
        server.suspended_until = self._clock() + min(
            LONGEST_SUSPENSION_S, FIRST_SUSPENSION_S * 2.0 ** min(server.suspensions - 1, 16)
        )
        server.reason = reason


def share_of(open_requests: int, servers: int) -> int:
    """Limit on open requests of a server that gets another one because of its cached prefix."""
    return math.ceil(OVERLOAD * (open_requests + 1) / servers)


def _rank(group: str, address: str) -> int:
    """The order in which a group prefers equally loaded servers, the same on every worker."""
    return zlib.crc32(f"{group} {address}".encode())

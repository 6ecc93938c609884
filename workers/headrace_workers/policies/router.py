"""Which of a policy's servers takes the next request: a pure core, with the clock passed in.

* A server that is out takes nothing while another is in; when all are out, the one that returns soonest is asked.
* An episode stays on its server, and a group near the first one's, unless that has more than its share.
* Else the server with the fewest open requests takes it. So none has more than ``OVERLOAD`` times its share.
* A server is put out after failures in a row, at once when nobody answers there, each time for longer.
* A server that is out returns when it answers, or when a probe of it does; then one failure puts it out again.

``sent`` opens a request at a server; exactly one of ``answered``, ``failed`` and ``let_go`` closes it.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

OVERLOAD = 1.5
"""A request leaves the server that has its prefix in its cache when that has so many times the mean of open requests.
Reading a prefix again costs less than waiting behind half as many requests again."""

FAILURES_IN_A_ROW = 3
"""So many put a server out. One may be the request's own fault, or an unlucky moment."""

FIRST_OUT_S = 1.0
"""How long a server is out the first time; it doubles."""

LONGEST_OUT_S = 60.0
"""A server that loads a large model is back within minutes; a probe a minute costs nothing."""

MAX_HOMES = 1 << 16
"""Episodes and groups whose server is remembered; the least recent are forgotten, and lose a cached prefix."""


@dataclass(slots=True)
class ServerRecord:
    """What is known of one server. ``out_until`` None: it is in. ``row``: failures in a row. ``outs``: how often it was
    put out since it last answered. ``heard_at``: when it last answered, or was asked with nothing open."""

    address: str
    open: int = 0
    requests: int = 0
    failures: int = 0
    row: int = 0
    outs: int = 0
    heard_at: float = 0.0
    out_until: float | None = None
    reason: str = ""


class Router:
    """All servers that a worker sends requests to. ``clock`` is monotonic, in seconds."""

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

    def is_in(self, address: str) -> bool:
        """Whether it takes requests."""
        return self.server(address).out_until is None

    def choose(self, pool: Sequence[str], *, policy: str, group: str, episode: str) -> str | None:
        """The server of ``pool`` that takes the next request of an episode; None if the pool is empty.

        ``policy`` tells apart the policies that an episode talks to: it has a home with each.
        """
        if len(pool) == 1:
            return pool[0]
        candidates = [self.server(address) for address in pool]
        inside = [server for server in candidates if server.out_until is None]
        if not inside:
            return min(candidates, key=lambda server: (server.out_until, server.open)).address if candidates else None
        chosen = self._home(inside, (policy, episode), (policy, group)) or min(
            inside, key=lambda server: (server.open, _rank(group, server.address))
        )
        self._settle((policy, episode), chosen.address)
        if (policy, group) not in self._homes:
            self._settle((policy, group), chosen.address)
        return chosen.address

    def _home(self, inside: list[ServerRecord], *keys: tuple[str, str]) -> ServerRecord | None:
        share = share_of(sum(server.open for server in inside), len(inside))
        for key in keys:
            home = self._homes.get(key)
            for server in inside:
                if server.address == home and server.open < share:
                    self._homes.move_to_end(key)
                    return server
        return None

    def _settle(self, key: tuple[str, str], address: str) -> None:
        self._homes[key] = address
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    # What becomes of requests

    def sent(self, address: str) -> None:
        """A request was opened there."""
        server = self.server(address)
        if not server.open:
            server.heard_at = self._clock()
        server.open += 1
        server.requests += 1

    def answered(self, address: str) -> None:
        """A request got an answer that is one."""
        server = self.server(address)
        server.open -= 1
        server.heard_at = self._clock()
        server.row = server.outs = 0
        server.out_until = None
        server.reason = ""

    def let_go(self, address: str) -> None:
        """A request ended, and that says nothing about the server."""
        self.server(address).open -= 1

    def failed(self, address: str, reason: str, *, at_once: bool = False) -> None:
        """A request failed by the server's fault. ``at_once``: so that no other should be sent there."""
        server = self.server(address)
        server.open -= 1
        server.failures += 1
        server.row += 1
        if server.out_until is None and (at_once or server.row >= FAILURES_IN_A_ROW):
            self._put_out(server, reason)

    # Probes

    def due(self) -> list[str]:
        """The servers that are out and whose time to be probed has come."""
        now = self._clock()
        return [
            server.address
            for server in self.servers.values()
            if server.out_until is not None and server.out_until <= now
        ]

    def heard(self, address: str) -> None:
        """A server with open requests said that it lives."""
        self.server(address).heard_at = self._clock()

    def silent(self, address: str, problem: str) -> None:
        """A server with open requests did not say that it lives."""
        server = self.server(address)
        if server.out_until is None:
            self._put_out(server, problem)

    def probed(self, address: str, problem: str) -> None:
        """What a probe of a server that is out found; empty: it lives."""
        server = self.servers.get(address)
        if server is None:
            return  # forgotten meanwhile
        if problem:
            self._put_out(server, problem)
        elif server.out_until is not None:
            server.out_until = None
            server.row = FAILURES_IN_A_ROW - 1

    def forget(self, keep: Collection[str]) -> None:
        """Forget the servers without open requests that are not among these."""
        for address in [name for name, server in self.servers.items() if not server.open and name not in keep]:
            del self.servers[address]

    def _put_out(self, server: ServerRecord, reason: str) -> None:
        server.outs += 1
        server.out_until = self._clock() + min(LONGEST_OUT_S, FIRST_OUT_S * 2.0 ** min(server.outs - 1, 16))
        server.reason = reason


def share_of(open_requests: int, servers: int) -> int:
    """Most open requests that a server may have for one more to go there for its cache's sake."""
    return math.ceil(OVERLOAD * (open_requests + 1) / servers)


def _rank(group: str, address: str) -> int:
    """The order in which a group prefers equally loaded servers: the same on every worker."""
    return zlib.crc32(f"{group} {address}".encode())

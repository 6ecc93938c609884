"""Limit of the open connections of a service.

* Connections leave descriptors in reserve for everything else that the service opens.
* At the limit the oldest connection on which no token was accepted is closed first, then the one with an accepted token
  that is idle for longest.
* A connection is refused only if every other one has an accepted token and carries a request.
* Connections on which no token was accepted have a lower limit of their own, because anyone may open them. It holds for
  those that had time to send a request: after a restart a whole fleet connects at once.
* A burst of silent connections is closed down to that limit, also if no other client connects after it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Protocol

from headrace.server import logs

log = logs.logger(__name__)

RESERVED_DESCRIPTORS = 256
"""Descriptors that connections leave free: for the log's files, the index, and connections to policy servers."""

MAX_CONNECTIONS = 16_384
"""Most connections, however many descriptors there are: each takes about 30 KB."""

MAX_UNKNOWN = 1024
"""Most connections without an accepted token. Each can make the service hold up to 0.5 MB."""

FIRST_REQUEST_S = 2.0
"""Seconds in which a client should have sent its first request, even if thousands connect at the same time."""

WARNING_INTERVAL_S = 60.0
"""Seconds between two warnings that connections are closed."""


class Connection(Protocol):
    """A connection as its limit uses it."""

    @property
    def waits_for_client(self) -> bool:
        """True unless the service handles a complete request of it."""

    @property
    def idle_since(self) -> float | None:
        """Time in seconds since which it carries no request; None during a request."""

    def abort(self) -> None:
        """Close it at once. Called at most once."""


class ConnectionLimit:
    """The open connections of a service, at most ``most``, of which ``most_unknown`` without an accepted token.

    ``clock``: the time in seconds.
    """

    def __init__(self, most: int, most_unknown: int, clock: Callable[[], float]) -> None:
        self.most = most
        self.most_unknown = min(most_unknown, most)
        self._clock = clock
        self._unknown: dict[Connection, float] = {}  # with the time of its opening, the oldest first
        self._accepted: dict[Connection, None] = {}
        self._closed = 0
        self._warned_at = float("-inf")

    def open(self, connection: Connection) -> bool:
        """Add a new connection, and close another one at the limit. False if the new one must be closed instead."""
        now = self._clock()
        is_full = len(self._unknown) + len(self._accepted) >= self.most
        is_full_of_unknown = len(self._unknown) >= self.most_unknown and self._has_late_one(now)
        if is_full or is_full_of_unknown:
            other = self._oldest_unknown() or (None if is_full_of_unknown else self._longest_idle())
            self._count_closed(now)
            if other is None:
                return False
            self.remove(other)
            other.abort()
        self._unknown[connection] = now
        return True

    def close_late(self) -> None:
        """Close the oldest connections without an accepted token that had time to send a request, down to their
        limit. Call it every ``FIRST_REQUEST_S``."""
        now = self._clock()
        for _ in range(len(self._unknown) - self.most_unknown):
            connection = self._oldest_unknown() if self._has_late_one(now) else None
            if connection is None:
                return
            self._count_closed(now)
            self.remove(connection)
            connection.abort()

    def accept(self, connection: Connection) -> None:
        """Note that a token was accepted on the connection."""
        if connection in self._unknown:
            del self._unknown[connection]
            self._accepted[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection that was closed."""
        self._unknown.pop(connection, None)
        self._accepted.pop(connection, None)

    def _has_late_one(self, now: float) -> bool:
        return now - next(iter(self._unknown.values())) >= FIRST_REQUEST_S

    def _oldest_unknown(self) -> Connection | None:
        """The oldest connection without an accepted token. Those whose request is being handled move to the end."""
        for _ in range(len(self._unknown)):
            connection = next(iter(self._unknown))
            if connection.waits_for_client:
                return connection
            self._unknown[connection] = self._unknown.pop(connection)
        return None

    def _longest_idle(self) -> Connection | None:
        idle = [(since, connection) for connection in self._accepted if (since := connection.idle_since) is not None]
        return min(idle, key=lambda entry: entry[0])[1] if idle else None

    def _count_closed(self, now: float) -> None:
        self._closed += 1
        if now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            log.warning("too many connections", limit=self.most, without_token=len(self._unknown), closed=self._closed)
            self._closed = 0


def limit_for_descriptors(clock: Callable[[], float]) -> ConnectionLimit:
    """The limit that fits this process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = MAX_CONNECTIONS + RESERVED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    most = max(descriptors // 2, descriptors - RESERVED_DESCRIPTORS)
    return ConnectionLimit(min(most, MAX_CONNECTIONS), MAX_UNKNOWN, clock)

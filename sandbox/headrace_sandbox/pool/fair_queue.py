"""A queue that owners share fairly.

* The next owner is the one that holds the least of the queued resource; among equals, the one served longest ago.
* Requests of one owner are served in their order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class WaitingRequest:
    """A waiting request. ``number``: the count of earlier requests. ``memory_bytes``: the memory it will take.
    ``deadline``: the end of its wait, which was to be at most ``wait_s``."""

    id: str
    number: int
    owner: str
    arrived_at: float
    deadline: float
    wait_s: float
    memory_bytes: int
    ttl_s: float
    queue: FairQueue
    last_failure: str = ""
    """The reason that the last sandbox for it could not be made."""


class FairQueue:
    """The queue for one resource. ``name``: the kind of sandbox; empty for executions in sandboxes of their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holdings: Counter[str] = Counter()
        self._waiting: dict[str, deque[WaitingRequest]] = {}
        self._served: dict[str, int] = {}
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WaitingRequest]:
        for queue in self._waiting.values():
            yield from queue

    def join(self, request: WaitingRequest) -> None:
        """Append a request to its owner's queue."""
        self._waiting.setdefault(request.owner, deque()).append(request)
        self._count += 1

    def head(self) -> WaitingRequest:
        """The next request."""
        owners = self._waiting
        if len(owners) == 1:
            return next(iter(owners.values()))[0]
        return owners[min(owners, key=lambda owner: (self.holdings[owner], self._served.get(owner, 0)))][0]

    def leave(self, request: WaitingRequest) -> None:
        """Remove a request."""
        queue = self._waiting[request.owner]
        queue.remove(request)
        self._count -= 1
        if not queue:
            del self._waiting[request.owner]
            self._forget(request.owner)

    def serve(self, request: WaitingRequest) -> None:
        """Remove a request that is served; its owner holds one more."""
        self._turn += 1
        self._served[request.owner] = self._turn
        self.holdings[request.owner] += 1
        self.leave(request)

    def done(self, owner: str) -> None:
        """Record that the owner holds one less."""
        self.holdings[owner] -= 1
        if not self.holdings[owner]:
            del self.holdings[owner]
            self._forget(owner)

    def _forget(self, owner: str) -> None:
        """Delete the state of an owner that neither holds nor waits: owners come and go."""
        if owner not in self._waiting and owner not in self.holdings:
            self._served.pop(owner, None)

"""The bounds that all runs share: bytes held by groups in flight, and bytes on disk.

* What is held and what is reserved, by all runs together, stays below the bound of the service.
* What is on disk and what is reserved stays below the bound of the disk.
* A run that a shared bound holds back is looked at again within ``RETRY_S`` of room coming back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

RETRY_S = 0.5
"""Seconds after which a held back run is looked at again: room comes back by what other runs and retention do."""


class Holds(Protocol):
    """What a run holds: its ledger."""

    @property
    def held_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...


@dataclass
class Bounds:
    """``max_held_bytes`` for groups in flight of all runs, ``max_disk_bytes`` for all that is stored; no bound by
    default. ``disk_bytes`` is what is stored now; whoever has the store says it."""

    max_held_bytes: float = math.inf
    max_disk_bytes: float = math.inf
    disk_bytes: int = 0
    holders: list[Holds] = field(default_factory=list)

    @property
    def exist(self) -> bool:
        """Whether there is any bound."""
        return min(self.max_held_bytes, self.max_disk_bytes) < math.inf

    @property
    def held_bytes(self) -> int:
        """Bytes of records of groups in flight."""
        return sum(holder.held_bytes for holder in self.holders)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that unfinished episodes are taken to need."""
        return sum(holder.reserved_bytes for holder in self.holders)

    @property
    def held_full(self) -> bool:
        """Whether the bound on what is held stops admission."""
        return self.max_held_bytes < math.inf and self.held_bytes + self.reserved_bytes >= self.max_held_bytes

    @property
    def disk_full(self) -> bool:
        """Whether the bound of the disk stops admission."""
        return self.max_disk_bytes < math.inf and self.disk_bytes + self.reserved_bytes >= self.max_disk_bytes

    def takes(self, new_bytes: int) -> bool:
        """Whether so many bytes more fit."""
        more = self.reserved_bytes + new_bytes
        return self.held_bytes + more <= self.max_held_bytes and self.disk_bytes + more <= self.max_disk_bytes

    @property
    def full(self) -> bool:
        """Whether either does."""
        return self.held_full or self.disk_full

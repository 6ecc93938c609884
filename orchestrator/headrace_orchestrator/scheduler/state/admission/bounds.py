"""Bounds that all runs share: bytes held by groups in flight, and bytes on disk.

* Bytes held and reserved by all runs together stay below the bound of the service.
* Bytes stored and reserved stay below the bound of the disk.
* A run that is held back continues soon, within ``RETRY_S``, after another returned room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

RETRY_S = 0.5
"""Seconds after which a run that is held back is checked again: other runs and retention return room."""


class ByteHolder(Protocol):
    """The ledger of a run, as the bounds read it."""

    @property
    def held_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...


@dataclass
class SharedBounds:
    """Bounds on ``max_held_bytes`` of groups in flight of all runs, and on ``max_disk_bytes`` of all stored data;
    unbounded by default. The owner of the store sets ``disk_bytes`` to the bytes stored now."""

    max_held_bytes: float = math.inf
    max_disk_bytes: float = math.inf
    disk_bytes: int = 0
    holders: list[ByteHolder] = field(default_factory=list)

    @property
    def exist(self) -> bool:
        """True if either bound is set."""
        return min(self.max_held_bytes, self.max_disk_bytes) < math.inf

    @property
    def held_bytes(self) -> int:
        """Bytes of trajectory records of groups in flight."""
        return sum(holder.held_bytes for holder in self.holders)

    @property
    def reserved_bytes(self) -> int:
        """Estimated bytes of unfinished episodes."""
        return sum(holder.reserved_bytes for holder in self.holders)

    @property
    def held_full(self) -> bool:
        """True if the bound on held bytes stops admission."""
        return self.max_held_bytes < math.inf and self.held_bytes + self.reserved_bytes >= self.max_held_bytes

    @property
    def disk_full(self) -> bool:
        """True if the bound of the disk stops admission."""
        return self.max_disk_bytes < math.inf and self.disk_bytes + self.reserved_bytes >= self.max_disk_bytes

    def fit(self, new_bytes: int) -> bool:
        """True if this many more bytes stay within both bounds."""
        more = self.reserved_bytes + new_bytes
        return self.held_bytes + more <= self.max_held_bytes and self.disk_bytes + more <= self.max_disk_bytes

    @property
    def full(self) -> bool:
        """True if either bound stops admission."""
        return self.held_full or self.disk_full

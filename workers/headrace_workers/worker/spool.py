"""Finished episodes that the orchestrator has not answered for yet.

* A record stays until its submission is answered: an outage reruns nothing.
* The spool is bounded in bytes, those of images included; when it is full, no new work is asked for.
* Records leave in the order they came, but for one that was postponed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from headrace.assets import AssetData
from headrace.wire.messages import Assignment, AttemptKey

AttemptName = tuple[str, int]
"""Episode and number of the attempt."""


class SpoolEntry(NamedTuple):
    """One finished attempt. ``assets`` are what the record refers to, by name. ``is_substitute``: a failed record in
    place of one that was refused."""

    assignment: Assignment
    record: bytes
    assets: Mapping[str, AssetData] = MappingProxyType({})
    is_substitute: bool = False

    @property
    def name(self) -> AttemptName:
        return self.assignment.episode, self.assignment.attempt

    @property
    def key(self) -> AttemptKey:
        return key_of(self.assignment)

    @property
    def size_bytes(self) -> int:
        return len(self.record) + sum(len(asset.data) for asset in self.assets.values())


def key_of(assignment: Assignment) -> AttemptKey:
    """The key of an assigned attempt."""
    return AttemptKey(assignment.episode, assignment.attempt, assignment.nonce)


class Spool:
    """In memory: a worker that dies loses its leases too, and its episodes are run again."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: dict[AttemptName, SpoolEntry] = {}
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self.filled = asyncio.Event()
        """Set while something is in it."""
        self.emptied = asyncio.Event()
        """Set while nothing is in it."""
        self.emptied.set()

    def __contains__(self, name: AttemptName) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether the bound is reached. What runs already is still taken."""
        return self.size_bytes >= self._max_bytes

    def add(self, entry: SpoolEntry) -> None:
        """Take a finished attempt."""
        self.remove(entry.name)
        self._entries[entry.name] = entry
        self.size_bytes += entry.size_bytes
        self.filled.set()
        self.emptied.clear()

    def remove(self, name: AttemptName) -> None:
        """Let an attempt go, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self.size_bytes -= entry.size_bytes
        if not self._entries:
            self.filled.clear()
            self.emptied.set()

    def postpone(self, name: AttemptName) -> None:
        """Put an entry behind all others, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._entries[name] = entry

    def oldest(self, max_records: int, max_bytes: int) -> list[SpoolEntry]:
        """The oldest entries within both bounds, at least one if there is any."""
        batch: list[SpoolEntry] = []
        size_bytes = 0
        for entry in islice(self._entries.values(), max_records):
            size_bytes += entry.size_bytes
            if batch and size_bytes > max_bytes:
                break
            batch.append(entry)
        return batch

    def entries(self) -> Iterable[SpoolEntry]:
        """All entries at this moment. Safe to call from another thread."""
        return list(self._entries.values())

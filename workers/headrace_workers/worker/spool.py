"""Spool of finished attempts whose submission has not been answered yet.

* A record stays until its submission is answered: an outage does not cause reruns.
* The spool is limited in bytes, including images; while it is full, the worker leases no attempts.
* Records are submitted in the order of their arrival, except postponed ones.
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
"""Episode id and attempt number."""


class SpoolEntry(NamedTuple):
    """A finished attempt. ``assets``: the assets that the record refers to, by name. ``is_substitute``: the record
    replaces one that was refused, and marks the attempt as failed."""

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
    """Return the key of an assigned attempt."""
    return AttemptKey(assignment.episode, assignment.attempt, assignment.nonce)


class Spool:
    """Spool in memory: a worker that dies also loses its leases, and its episodes are run again."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: dict[AttemptName, SpoolEntry] = {}
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self.filled = asyncio.Event()
        """Set while the spool has entries."""
        self.emptied = asyncio.Event()
        """Set while the spool is empty."""
        self.emptied.set()

    def __contains__(self, name: AttemptName) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """True if the limit is reached. Attempts that already run are still added."""
        return self.size_bytes >= self._max_bytes

    def add(self, entry: SpoolEntry) -> None:
        """Add a finished attempt, replacing an entry of the same name."""
        self.remove(entry.name)
        self._entries[entry.name] = entry
        self.size_bytes += entry.size_bytes
        self.filled.set()
        self.emptied.clear()

    def remove(self, name: AttemptName) -> None:
        """Remove an attempt, if present."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self.size_bytes -= entry.size_bytes
        if not self._entries:
            self.filled.clear()
            self.emptied.set()

    def postpone(self, name: AttemptName) -> None:
        """Move an entry behind all others, if present."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._entries[name] = entry

    def oldest(self, max_records: int, max_bytes: int) -> list[SpoolEntry]:
        """Return the oldest entries within both limits, at least one unless the spool is empty."""
        batch: list[SpoolEntry] = []
        size_bytes = 0
        for entry in islice(self._entries.values(), max_records):
            size_bytes += entry.size_bytes
            if batch and size_bytes > max_bytes:
                break
            batch.append(entry)
        return batch

    def entries(self) -> Iterable[SpoolEntry]:
        """Return all current entries. Safe to call from another thread."""
        return list(self._entries.values())

"""Finished episodes that the orchestrator has not answered for yet.

* A record stays until its submission is answered: an outage reruns nothing.
* The spool is bounded in bytes; when it is full, no new work is asked for.
* Records leave in the order they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from headrace.wire import Assignment, AttemptKey

AttemptName = tuple[str, int]
"""Episode and number of the attempt."""


class Entry(NamedTuple):
    """One finished attempt. ``is_substitute``: a failed record in place of one that was refused."""

    assignment: Assignment
    record: bytes
    is_substitute: bool = False

    @property
    def name(self) -> AttemptName:
        return self.assignment.episode, self.assignment.attempt

    @property
    def key(self) -> AttemptKey:
        return key_of(self.assignment)


def key_of(assignment: Assignment) -> AttemptKey:
    """The key of an assigned attempt."""
    return AttemptKey(assignment.episode, assignment.attempt, assignment.nonce)


class Spool:
    """In memory: a worker that dies loses its leases too, and its episodes are run again."""

    def __init__(self, max_bytes: int) -> None:
        self._entries: dict[AttemptName, Entry] = {}
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

    def add(self, entry: Entry) -> None:
        """Take a finished attempt."""
        self.remove(entry.name)
        self._entries[entry.name] = entry
        self.size_bytes += len(entry.record)
        self.filled.set()
        self.emptied.clear()

    def remove(self, name: AttemptName) -> None:
        """Let an attempt go, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self.size_bytes -= len(entry.record)
        if not self._entries:
            self.filled.clear()
            self.emptied.set()

    def oldest(self, max_records: int, max_bytes: int) -> list[Entry]:
        """The oldest entries within both bounds, at least one if there is any."""
        batch: list[Entry] = []
        size_bytes = 0
        for entry in islice(self._entries.values(), max_records):
            size_bytes += len(entry.record)
            if batch and size_bytes > max_bytes:
                break
            batch.append(entry)
        return batch

    def entries(self) -> Iterable[Entry]:
        """All entries at this moment. Safe to call from another thread."""
        return list(self._entries.values())

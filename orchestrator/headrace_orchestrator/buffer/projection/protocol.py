"""The operations of a projection, as any database could offer them.

A projection follows from the log alone, so it takes entries, not rows. ``SqliteProjection`` is the one implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from headrace.wire import messages
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, StoredTrajectory


class Projection(Protocol):
    """Lookups in the log, and pages of its trajectories. One thread writes at a time; any thread may read. Each method
    raises StoreError."""

    @property
    def cursor(self) -> int:
        """Position in the log up to which everything was projected."""

    def reset(self) -> None:
        """Delete everything: the log can restore it."""

    def write(self, entries: Iterable[LocatedEntry], cursor: int) -> None:
        """Add entries in order and move the cursor, in one transaction."""

    def check(self) -> None:
        """Verify all tables and indexes, before data is deleted because of them. Not on the event loop."""

    def trim(self) -> None:
        """Release disk space that is not needed any more."""

    def find(self, trajectory: str) -> StoredTrajectory | None:
        """A trajectory by its id."""

    def find_episode(self, episode: str) -> StoredTrajectory | None:
        """The terminal record of an episode."""

    def episodes_of(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Episodes of the given trajectories by id, without unknown ones. Called on the event loop."""

    def referenced(self, assets: Sequence[str]) -> set[str]:
        """The given assets that a trajectory refers to. Called on the event loop."""

    def assets_of(self, file: int) -> list[str]:
        """The assets that trajectories in a file of the log refer to."""

    def files(self) -> list[int]:
        """The files of the log that entries come from, ascending."""

    def count(self, file: int) -> int:
        """Number of trajectories in a file of the log."""

    def batch_of(self, run: str, group: str) -> Location | None:
        """Location of the head of the batch that a group was last frozen into."""

    def page(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None, *, now_ms: int
    ) -> tuple[list[messages.TrajectorySummary], int | None]:
        """A page of trajectories, newest first, and ``before`` of the next page (None at the end)."""

    def wal_bytes(self) -> int:
        """Bytes that were written and not merged yet."""

    def close(self) -> None:
        """Bring everything to disk and close."""

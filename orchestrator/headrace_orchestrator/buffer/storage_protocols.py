"""What another store would have to offer in place of a part of the embedded one, and no more.

* ``LocalFiles`` is a ``LogFiles``, ``Projection`` is a ``Projection``; the type checker holds them to it.
* The log itself has no seam: one process appends to one local file, and that it is synced is the whole promise.

Sealed files never change, so an object store can hold them: ``LogFiles`` reads a frame of one, lists and deletes
them. All that is listed follows from the log, so any database can hold it: ``Projection`` takes entries, not rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from headrace.wire import messages
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, StoredTrajectory


class LogFiles(Protocol):
    """Files of a log. Methods may be called from any thread, and may take as long as a disk or a network does."""

    def sizes(self) -> dict[int, tuple[int, float]]:
        """Size in bytes of each file, and when it was last written (Unix time in seconds)."""

    def read(self, number: int, offset: int, length: int) -> bytes:
        """The payload of the frame at an offset, checked. Raises CorruptRecord."""

    def remove(self, number: int) -> int:
        """Delete a file; gives its bytes. Raises OSError."""

    def let_go(self, number: int) -> None:
        """Nobody is expected to read from a sealed file any more: keep nothing of it in memory."""

    def forget(self, number: int) -> None:
        """Keep nothing of a file whose number was given away anew."""

    def close(self) -> None:
        """Let go of everything."""


class Projection(Protocol):
    """What lookups and pages are answered from. One thread writes at a time; readers may be in any. Each raises
    StoreError."""

    @property
    def cursor(self) -> int:
        """Position in the log up to which everything was taken in."""

    def reset(self) -> None:
        """Forget everything: the log will give it back."""

    def write(self, waiting: Iterable[LocatedEntry], cursor: int) -> None:
        """Take in what is listed, in order, and move the cursor: both or nothing."""

    def check(self) -> None:
        """See that nothing of it is damaged, before something is deleted on its word. Not on the event loop."""

    def trim(self) -> None:
        """Give back space that is not needed any more."""

    def find(self, trajectory: str) -> StoredTrajectory | None:
        """A trajectory by its id."""

    def find_episode(self, episode: str) -> StoredTrajectory | None:
        """The terminal record of an episode."""

    def owners(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Of these trajectories those that are here, with their episodes. Asked on the event loop."""

    def referred(self, assets: Sequence[str]) -> set[str]:
        """Of these assets those that a trajectory refers to. Asked on the event loop."""

    def assets_of(self, file: int) -> list[str]:
        """The assets that trajectories in a file of the log refer to."""

    def files(self) -> list[int]:
        """The files of the log that anything here is of, ascending."""

    def count(self, file: int) -> int:
        """How many trajectories lie in a file of the log."""

    def batch_of(self, run: str, group: str) -> Location | None:
        """Where the head of the batch is that a group was last frozen into."""

    def page(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None, *, now_ms: int
    ) -> tuple[list[messages.TrajectorySummary], int | None]:
        """A page, newest first, and the ``before`` of the next one (None at the end)."""

    def wal_bytes(self) -> int:
        """Bytes that were written and not merged yet."""

    def close(self) -> None:
        """Be whole on disk."""

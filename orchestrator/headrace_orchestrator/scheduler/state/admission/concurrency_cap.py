"""The concurrency cap: the number of training episodes that the policy servers of a run take at a time.

* The cap limits training episodes at workers, not admission and not evaluation; a run has no cap until it is set.
* A lower cap stops no running episode; nothing is granted until enough of them are over.
* While the cap holds training back, evaluation keeps to its share of the slots.

It is not stored: the watch of the policy servers sets it again after a restart.
"""

from __future__ import annotations

UNLIMITED = 1 << 62
"""Room of a run without a cap."""


class ConcurrencyCap:
    """The cap of one run. ``slots``: training episodes that may be at workers; None for no cap. ``leased_before``: the
    number at workers when it was set."""

    __slots__ = ("leased_before", "slots")

    def __init__(self) -> None:
        self.slots: int | None = None
        self.leased_before = 0

    def set(self, slots: int | None, leased: int) -> bool:
        """Set the cap, at least 1, while ``leased`` training episodes are at workers; returns True if there is more
        room than before."""
        before = self.room(leased)
        self.slots = None if slots is None else max(1, slots)
        self.leased_before = leased
        return self.room(leased) > before

    def room(self, leased: int) -> int:
        """Training episodes that may be granted beside those that are leased."""
        return UNLIMITED if self.slots is None else max(0, self.slots - leased)

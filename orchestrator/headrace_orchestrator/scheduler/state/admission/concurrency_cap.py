"""The cap: how many training episodes the policy servers of a run take at a time, as whoever watches them says.

* It limits training episodes at workers, not admission, and not evaluation; without a word there is none.
* A lower one stops nothing that runs; nothing new is granted until enough of it is over.
* While it holds training back, evaluation keeps to its share of the slots.

It is soft: after a restart there is none until it is said again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.state.run import Run

UNLIMITED = 1 << 62
"""Room of a run without a cap."""


class ConcurrencyCap:
    """``slots``: training episodes that may be at workers; None for no cap. ``over``: how many were there when that was
    said."""

    __slots__ = ("over", "slots")

    def __init__(self) -> None:
        self.slots: int | None = None
        self.over = 0


def set_slots(run: Run, slots: int | None) -> bool:
    """Set the cap, at least 1; returns whether there is more room than before."""
    before = room(run)
    run.concurrency_cap.slots = None if slots is None else max(1, slots)
    run.concurrency_cap.over = run.leased
    return room(run) > before


def room(run: Run) -> int:
    """Training episodes that the cap lets a run have more of."""
    return UNLIMITED if run.concurrency_cap.slots is None else max(0, run.concurrency_cap.slots - run.leased)


def trainable(run: Run) -> int:
    """Queued training episodes that may be granted now: none while nothing could be served of what they would play."""
    return 0 if run.outdated else min(run.queued, room(run))


def evaluable(run: Run, share: int) -> int:
    """Queued evaluation episodes that may be granted now: beyond their ``share`` of slots only where nothing that
    trains is held back."""
    if run.queued > room(run):
        return min(run.evaluation_ready, max(0, share - run.evaluation_leased))
    return run.evaluation_ready


def saturated(run: Run) -> bool:
    """Whether the cap holds back what is queued."""
    return run.queued > 0 and room(run) == 0

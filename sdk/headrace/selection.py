"""Selection rules: the order in which a run's eligible groups go into batches. Definitions: ``docs/selection.md``.

* A rule accesses groups only by dispatch order and by weight, so that selecting a few is cheap.
* A rule has no random generator: its draws come from the run's seed, so that a replay repeats them.
* Other packages add rules by the entry point group ``headrace.selection``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from headrace.common.registry import Registry

ENTRY_POINT_GROUP = "headrace.selection"
"""Each entry point of this group names a ``SelectionRule``; the entry point's name is the rule's."""


class EligibleGroups(Protocol):
    """The eligible groups of a run that match a pull, as a rule accesses them."""

    def in_order(self, *, backwards: bool = False) -> Iterator[Any]:
        """Iterate over groups in the order of their dispatch."""

    def drawn(self) -> Iterator[Any]:
        """Draw groups by weight, without replacement."""


class SelectionRule(NamedTuple):
    """A rule for ``selection.order`` in a run spec.

    ``order`` iterates over the groups in the order of the rule. ``weight`` returns the weight of a group in a draw,
    above 0, from its priority and ``selection.exponent``; None: all weights are equal, and priorities cannot be set.
    ``waits``: True if a batch waits for the oldest group in flight rather than let it go stale.
    """

    order: Callable[[EligibleGroups], Iterator[Any]]
    weight: Callable[[float, float], float] | None = None
    waits: bool = False


SELECTION_RULES = Registry(
    "selection rule",
    ENTRY_POINT_GROUP,
    SelectionRule,
    {
        "fifo": SelectionRule(lambda groups: groups.in_order(), waits=True),
        "ready": SelectionRule(lambda groups: groups.in_order()),
        "lifo": SelectionRule(lambda groups: groups.in_order(backwards=True)),
        "uniform": SelectionRule(lambda groups: groups.drawn()),
        "prioritized": SelectionRule(lambda groups: groups.drawn(), lambda priority, exponent: priority**exponent),
    },
)
"""The rules of Headrace."""

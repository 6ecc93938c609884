"""Selection rules: the order in which the eligible groups of a run go into batches. Definitions: ``docs/selection.md``.

* A rule sees groups by dispatch order and by weight alone, so that choosing a few of them looks at few.
* A rule draws no random numbers of its own: its draws come from the run's seed, so that a replay draws alike.
* Third parties add rules by the entry point group ``headrace.selection``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

from headrace.errors import InvalidRequest

ENTRY_POINT_GROUP = "headrace.selection"
"""Entry points of this group name a ``SelectionRule`` each; the entry point's name is the rule's."""


class EligibleGroups(Protocol):
    """The eligible groups of a run that fit a pull, for a rule to go through."""

    def in_order(self, *, backwards: bool = False) -> Iterator[Any]:
        """Groups in the order of their dispatch."""

    def drawn(self) -> Iterator[Any]:
        """Groups drawn by weight, without replacement."""


class SelectionRule(NamedTuple):
    """The rule of ``selection.order`` in a run spec. ``order`` gives the groups, the first ones first. ``weight`` gives
    the weight of a group in a draw, above 0, from its priority and ``selection.exponent``; None: all weigh the same,
    and the learner can set no priorities."""

    order: Callable[[EligibleGroups], Iterator[Any]]
    weight: Callable[[float, float], float] | None = None


SELECTION_RULES: dict[str, SelectionRule] = {
    "fifo": SelectionRule(lambda groups: groups.in_order()),
    "lifo": SelectionRule(lambda groups: groups.in_order(backwards=True)),
    "uniform": SelectionRule(lambda groups: groups.drawn()),
    "prioritized": SelectionRule(lambda groups: groups.drawn(), lambda priority, exponent: priority**exponent),
}
"""The rules that come with Headrace."""


def selection_rule_names() -> list[str]:
    """Names of all rules, those of installed third parties included."""
    return [*SELECTION_RULES, *sorted(_entry_points().keys() - SELECTION_RULES.keys())]


def find_selection_rule(name: str) -> SelectionRule:
    """The rule of that name. Raises InvalidRequest."""
    found = SELECTION_RULES.get(name)
    if found is None and name in (points := _entry_points()):
        found = points[name].load()
    if found is None:
        raise InvalidRequest(f"No selection rule {name!r}.", hint=f"Known: {', '.join(selection_rule_names())}.")
    return found


@functools.cache
def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}

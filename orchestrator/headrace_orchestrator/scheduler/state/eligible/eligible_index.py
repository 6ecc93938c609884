"""The eligible groups of a run, indexed so that selecting a few of them reads only a few.

* Groups that a new version leaves out of bound are set aside, a whole tree at a time, and never chosen.
* A draw is the same in whatever order the groups became eligible.
* A group whose weight cannot be computed has the lowest, and the next choice tells it.

A tree holds the groups of one kind (environment and tags) and one span (lowest and highest versions).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from headrace.errors import SelectionRuleFailed
from headrace_orchestrator.scheduler.state.eligible.draw_weights import LOWEST
from headrace_orchestrator.scheduler.state.eligible.filters import GroupFilter, TaskKind, kind_of
from headrace_orchestrator.scheduler.state.eligible.sum_tree import SumTree
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.versions import Span, Versions, span_of

TreeKey = tuple[TaskKind, Span]


class EligibleIndex:
    """Eligible groups. ``weight_of`` computes a group's weight in a draw, at least 1, or raises SelectionRuleFailed."""

    def __init__(self, bound: int, weight_of: Callable[[Group], int]) -> None:
        self._bound = bound
        self._weight_of = weight_of
        #: Groups by place in the order of dispatch.
        self._groups: dict[int, Group] = {}
        #: Groups whose weight could not be computed, by place.
        self._unweighted: dict[int, Group] = {}
        self._in_bound: dict[TreeKey, SumTree] = {}
        #: Trees of groups that are out of bound: they are never chosen, and wait to be retired.
        self._out_of_bound: dict[TreeKey, SumTree] = {}

    def __len__(self) -> int:
        """Groups that may be chosen."""
        return sum(map(len, self._in_bound.values()))

    def count(self, filter: GroupFilter) -> int:
        """Groups of fitting kinds that may be chosen."""
        return sum(len(tree) for (kind, _), tree in self._in_bound.items() if filter.fits(kind))

    def weight_before(self, filter: GroupFilter, place: int) -> int:
        """The sum of the weights of groups of fitting kinds that may be chosen and were dispatched before a place. With
        equal weights it is their number."""
        return sum(tree.weight_before(place) for (kind, _), tree in self._in_bound.items() if filter.fits(kind))

    def add(self, group: Group, versions: Versions) -> None:
        """Add an eligible group."""
        key = _key_of(group)
        tree = self._in_bound.get(key)
        if tree is None:
            trees = self._out_of_bound if versions.bound_violation(key[1], self._bound) else self._in_bound
            tree = trees.setdefault(key, SumTree())
        tree.add(group.dispatch_order, self._weight(group))
        self._groups[group.dispatch_order] = group

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self._groups[group.dispatch_order]
        self._unweighted.pop(group.dispatch_order, None)
        key = _key_of(group)
        trees = self._in_bound if key in self._in_bound else self._out_of_bound
        tree = trees[key]
        tree.remove(group.dispatch_order)
        if not tree:
            del trees[key]

    def update_weight(self, group: Group) -> None:
        """Use a group's new weight, if the group is in the index."""
        if group.dispatch_order in self._groups:
            key = _key_of(group)
            tree = self._in_bound[key] if key in self._in_bound else self._out_of_bound[key]
            tree.remove(group.dispatch_order)
            self._unweighted.pop(group.dispatch_order, None)
            tree.add(group.dispatch_order, self._weight(group))

    def require_weights(self) -> None:
        """Compute the weights again that could not be computed. Raises SelectionRuleFailed at the first that still
        cannot."""
        for group in list(self._unweighted.values()):
            self._weight_of(group)
            self.update_weight(group)

    def may_be_chosen(self, group: Group, filter: GroupFilter) -> bool:
        """True if this group is in the index, within bound, and of a fitting kind; also while it is drawn."""
        kind, span = _key_of(group)
        indexed = self._groups.get(group.dispatch_order) is group
        return indexed and (kind, span) in self._in_bound and filter.fits(kind)

    def update_versions(self, versions: Versions) -> None:
        """Sort the trees again after a change of the current version: a rewind may bring some back within bound."""
        trees = self._in_bound | self._out_of_bound
        outside = {key for key in trees if versions.bound_violation(key[1], self._bound)}
        self._in_bound = {key: tree for key, tree in trees.items() if key not in outside}
        self._out_of_bound = {key: tree for key, tree in trees.items() if key in outside}

    def out_of_bound(self, limit: int | None = None) -> list[Group]:
        """Up to ``limit`` groups that are out of bound and wait to be retired, oldest dispatch of a tree first."""
        places = chain.from_iterable(self._out_of_bound[key].places() for key in sorted(self._out_of_bound))
        return [self._groups[place] for place in islice(places, limit)]

    def in_order(self, filter: GroupFilter, *, backwards: bool = False) -> Iterator[Group]:
        """Groups by dispatch order."""
        places = [tree.places(backwards) for tree in self._fitting(filter)]
        ordered = places[0] if len(places) == 1 else heapq.merge(*places, reverse=backwards)
        return (self._groups[place] for place in ordered)

    def drawn(self, filter: GroupFilter, draw: Callable[[int], int]) -> Generator[Group, None, None]:
        """Groups drawn by weight without replacement; ``draw`` returns a number below its argument. Close it after use:
        until then drawn groups are missing here."""
        trees = self._fitting(filter)
        total = sum(tree.total for tree in trees)
        removed: list[tuple[SumTree, int, int]] = []
        try:
            while total:
                tree, weight_left = _tree_at(trees, draw(total))
                place = tree.place_at(weight_left)
                weight = tree.remove(place)
                removed.append((tree, place, weight))
                total -= weight
                yield self._groups[place]
        finally:
            for tree, place, weight in removed:
                tree.add(place, weight)

    def _fitting(self, filter: GroupFilter) -> list[SumTree]:
        """Trees within bound, sorted by key, so that nothing depends on the order in which they were made."""
        fitting = [item for item in self._in_bound.items() if filter.fits(item[0][0])]
        return [tree for _, tree in sorted(fitting, key=lambda item: item[0])]

    def _weight(self, group: Group) -> int:
        """The weight of a group; the lowest if it cannot be computed, because applying an event must not fail."""
        try:
            return self._weight_of(group)
        except SelectionRuleFailed:
            self._unweighted[group.dispatch_order] = group
            return LOWEST

    def contents(self) -> list[Any]:
        """The trees as plain values."""
        trees = [(key, True, tree) for key, tree in self._in_bound.items()]
        trees += [(key, False, tree) for key, tree in self._out_of_bound.items()]
        return sorted(
            (
                (key, inside, [[(node, *level[node]) for node in sorted(level)] for level in tree.levels], tree.total)
                for key, inside, tree in trees
            )
        )


def _key_of(group: Group) -> TreeKey:
    return kind_of(group.task), span_of(group.versions())


def _tree_at(trees: Sequence[SumTree], weight: int) -> tuple[SumTree, int]:
    for tree in trees:
        if weight < tree.total:
            return tree, weight
        weight -= tree.total
    raise ValueError("The weight is not below the total of the trees.")

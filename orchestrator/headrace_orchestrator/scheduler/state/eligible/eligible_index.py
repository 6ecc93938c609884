"""The eligible groups of a run, arranged so that choosing a few of them looks at few.

* A group stands on the shelf of its kind (environment and tags) and its span (lowest and highest versions).
* What the version now leaves behind is set aside a shelf at a time, however much stands on it.
* The first, the last, and the one at a given weight are found in the logarithm of what stands there.
* What is found depends on what stands there alone, never on how it came there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from headrace_orchestrator.scheduler.state.eligible.filters import Filter, Kind, kind_of
from headrace_orchestrator.scheduler.state.versions import Span, Versions, span_of

if TYPE_CHECKING:
    from headrace_orchestrator.scheduler.state.groups import Group

FANOUT_BITS = 4
FANOUT = 1 << FANOUT_BITS
"""Weights, or sums of the level below, that share a node: few enough to look through, enough that levels are few."""

LEVELS = 5
"""A node of the top covers a million places in the order of dispatch; the top is gone through."""


class SumTree:
    """Weights by place in the order of dispatch, with sums over ranges of places. Weights are whole numbers, so that
    sums are exact and the same whatever was added and removed before."""

    __slots__ = ("count", "levels", "total")

    def __init__(self) -> None:
        #: Nodes by what their places have in common: of weights, then of sums of the nodes below. None is all zeros.
        self.levels: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(LEVELS))
        self.total = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def put(self, place: int, weight: int) -> None:
        """Add a place that is not there; weights are at least 1."""
        self.total += weight
        self.count += 1
        for level in self.levels:
            key, index = place >> FANOUT_BITS, place & (FANOUT - 1)
            node = level.get(key)
            if node is None:
                node = level[key] = [0] * FANOUT
            node[index] += weight
            place = key

    def take(self, place: int) -> int:
        """Remove a place; gives its weight."""
        weight = self.levels[0][place >> FANOUT_BITS][place & (FANOUT - 1)]
        self.total -= weight
        self.count -= 1
        for level in self.levels:
            key, index = place >> FANOUT_BITS, place & (FANOUT - 1)
            node = level[key]
            node[index] -= weight
            if not node[index] and not any(node):
                del level[key]
            place = key
        return weight

    def at(self, weight: int) -> int:
        """The place where the weights, added up in order, first exceed this one, which is below the total."""
        place = 0
        for place in sorted(self.levels[-1]):
            here = sum(self.levels[-1][place])
            if weight < here:
                break
            weight -= here
        for level in reversed(self.levels):
            index = 0
            for index, here in enumerate(level[place]):  # noqa: B007  where it stops is wanted
                if weight < here:
                    break
                weight -= here
            place = place << FANOUT_BITS | index
        return place

    def places(self, backwards: bool = False) -> Iterator[int]:
        """All places in order."""
        for key in sorted(self.levels[-1], reverse=backwards):
            yield from self._below(LEVELS - 1, key, backwards)

    def _below(self, depth: int, key: int, backwards: bool) -> Iterator[int]:
        node = self.levels[depth][key]
        for index in reversed(range(FANOUT)) if backwards else range(FANOUT):
            if node[index]:
                place = key << FANOUT_BITS | index
                if depth:
                    yield from self._below(depth - 1, place, backwards)
                else:
                    yield place


class EligibleIndex:
    """All shelves of a run. ``weigh`` gives a group's weight in a draw, at least 1."""

    def __init__(self, bound: int, weigh: Callable[[Group], int]) -> None:
        self._bound = bound
        self._weigh = weigh
        #: Eligible groups by place.
        self._groups: dict[int, Group] = {}
        self._fresh: dict[tuple[Kind, Span], SumTree] = {}
        #: Shelves of what is out of bound; their groups are never chosen and wait to be retired.
        self._behind: dict[tuple[Kind, Span], SumTree] = {}

    def __len__(self) -> int:
        """Groups that may be chosen."""
        return sum(map(len, self._fresh.values()))

    def count(self, filter: Filter) -> int:
        """Groups of fitting kinds that may be chosen."""
        return sum(len(shelf) for (kind, _), shelf in self._fresh.items() if filter.fits(kind))

    def add(self, group: Group, versions: Versions) -> None:
        """Put up an eligible group."""
        key = (kind_of(group.task), span_of(group.versions()))
        shelf = self._fresh.get(key)
        if shelf is None:
            eligible = self._behind if versions.left_behind(key[1], self._bound) else self._fresh
            shelf = eligible.setdefault(key, SumTree())
        shelf.put(group.order, self._weigh(group))
        self._groups[group.order] = group

    def remove(self, group: Group) -> None:
        """Take a group down."""
        del self._groups[group.order]
        key = (kind_of(group.task), span_of(group.versions()))
        eligible = self._fresh if key in self._fresh else self._behind
        shelf = eligible[key]
        shelf.take(group.order)
        if not shelf:
            del eligible[key]

    def reweigh(self, group: Group) -> None:
        """Take note of a group's new weight, if it stands here."""
        if group.order in self._groups:
            key = (kind_of(group.task), span_of(group.versions()))
            shelf = self._fresh[key] if key in self._fresh else self._behind[key]
            shelf.take(group.order)
            shelf.put(group.order, self._weigh(group))

    def turn_to(self, versions: Versions) -> None:
        """Sort the shelves anew after a change of the version now: a rewind may bring some back within bound."""
        eligible = self._fresh | self._behind
        behind = {key for key in eligible if versions.left_behind(key[1], self._bound)}
        self._fresh = {key: shelf for key, shelf in eligible.items() if key not in behind}
        self._behind = {key: shelf for key, shelf in eligible.items() if key in behind}

    def behind(self, limit: int | None = None) -> list[Group]:
        """Up to so many groups that are out of bound and wait to be retired, oldest dispatch of a shelf first."""
        places = chain.from_iterable(self._behind[key].places() for key in sorted(self._behind))
        return [self._groups[place] for place in islice(places, limit)]

    def in_order(self, filter: Filter, *, backwards: bool = False) -> Iterator[Group]:
        """Groups by dispatch order."""
        places = [shelf.places(backwards) for _, shelf in self._fitting(filter)]
        ordered = places[0] if len(places) == 1 else heapq.merge(*places, reverse=backwards)
        return (self._groups[place] for place in ordered)

    def drawn(self, filter: Filter, draw: Callable[[int], int]) -> Generator[Group, None, None]:
        """Groups drawn by weight without replacement; ``draw`` gives a number below its argument. Close it after use:
        until then what was drawn is missing here."""
        eligible = [shelf for _, shelf in self._fitting(filter)]
        total = sum(shelf.total for shelf in eligible)
        taken: list[tuple[SumTree, int, int]] = []
        try:
            while total:
                shelf, at = _shelf_at(eligible, draw(total))
                place = shelf.at(at)
                weight = shelf.take(place)
                taken.append((shelf, place, weight))
                total -= weight
                yield self._groups[place]
        finally:
            for shelf, place, weight in taken:
                shelf.put(place, weight)

    def _fitting(self, filter: Filter) -> list[tuple[tuple[Kind, Span], SumTree]]:
        """Fresh shelves in an order of their own, so that nothing hangs on which was there first."""
        return sorted((item for item in self._fresh.items() if filter.fits(item[0][0])), key=lambda item: item[0])

    def contents(self) -> list[Any]:
        """What stands where, as plain values."""
        eligible = [(key, True, shelf) for key, shelf in self._fresh.items()]
        eligible += [(key, False, shelf) for key, shelf in self._behind.items()]
        return sorted(
            (
                (key, fresh, [[(node, *level[node]) for node in sorted(level)] for level in shelf.levels], shelf.total)
                for key, fresh, shelf in eligible
            )
        )


def _shelf_at(eligible: Sequence[SumTree], weight: int) -> tuple[SumTree, int]:
    for shelf in eligible:
        if weight < shelf.total:
            return shelf, weight
        weight -= shelf.total
    raise ValueError("The weight is not below the total of the shelves.")

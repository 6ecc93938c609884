"""A sum tree: weights by place in the order of dispatch, with sums over ranges of places.

* The first, the last, and the place at a given weight are found in the logarithm of the number of places.
* Weights are whole numbers, so that sums are exact and the same after any additions and removals.
"""

from __future__ import annotations

from collections.abc import Iterator

FANOUT_BITS = 4
FANOUT = 1 << FANOUT_BITS
"""Weights, or sums of the level below, that share a node: few enough to scan, enough that levels are few."""

LEVELS = 5
"""Levels of nodes. A node of the top covers a million places in the order of dispatch; the top is scanned."""


class SumTree:
    """Weights by place."""

    __slots__ = ("count", "levels", "total")

    def __init__(self) -> None:
        #: Nodes by the common prefix of their places: of weights, then of sums of the nodes below. None is all zeros.
        self.levels: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(LEVELS))
        self.total = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def add(self, place: int, weight: int) -> None:
        """Add a new place; weights are at least 1."""
        self.total += weight
        self.count += 1
        for level in self.levels:
            key, index = place >> FANOUT_BITS, place & (FANOUT - 1)
            node = level.get(key)
            if node is None:
                node = level[key] = [0] * FANOUT
            node[index] += weight
            place = key

    def remove(self, place: int) -> int:
        """Remove a place; returns its weight."""
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

    def place_at(self, weight: int) -> int:
        """The place where the weights, added up in order, first exceed this one, which is below the total."""
        place = 0
        for place in sorted(self.levels[-1]):
            here = sum(self.levels[-1][place])
            if weight < here:
                break
            weight -= here
        for level in reversed(self.levels):
            index = 0
            for index, here in enumerate(level[place]):  # noqa: B007  the index at the break is used
                if weight < here:
                    break
                weight -= here
            place = place << FANOUT_BITS | index
        return place

    def weight_before(self, place: int) -> int:
        """The sum of the weights of lower places."""
        total = 0
        for level in self.levels:
            key, index = place >> FANOUT_BITS, place & (FANOUT - 1)
            node = level.get(key)
            if node is not None:
                total += sum(node[:index])
            place = key
        return total + sum(sum(node) for key, node in self.levels[-1].items() if key < place)

    def places(self, backwards: bool = False) -> Iterator[int]:
        """All places in order."""
        for key in sorted(self.levels[-1], reverse=backwards):
            yield from self._places_below(LEVELS - 1, key, backwards)

    def _places_below(self, depth: int, key: int, backwards: bool) -> Iterator[int]:
        node = self.levels[depth][key]
        for index in reversed(range(FANOUT)) if backwards else range(FANOUT):
            if node[index]:
                place = key << FANOUT_BITS | index
                if depth:
                    yield from self._places_below(depth - 1, place, backwards)
                else:
                    yield place

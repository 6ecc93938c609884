"""The sum tree against a plain dictionary of weights."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from headrace_orchestrator.scheduler.state.eligible.sum_tree import SumTree

PLACES = st.one_of(st.integers(0, 70), st.integers(0, 1 << 40))
WEIGHTS = st.one_of(st.just(1), st.integers(1, 1 << 260))


@given(st.dictionaries(PLACES, WEIGHTS, max_size=60), st.data())
def test_the_first_the_last_and_the_place_at_a_given_weight_are_found(weights, data):
    tree = SumTree()
    for place, weight in weights.items():
        tree.add(place, weight)
    ordered = sorted(weights)
    assert list(tree.places()) == ordered
    assert list(tree.places(backwards=True)) == ordered[::-1]
    if weights:
        target = data.draw(st.integers(0, sum(weights.values()) - 1))
        below = 0
        for place in ordered:
            below += weights[place]
            if target < below:
                break
        assert tree.place_at(target) == place


@given(st.dictionaries(PLACES, WEIGHTS, max_size=60), PLACES)
def test_the_weights_before_a_place_are_summed(weights, place):
    tree = SumTree()
    for other, weight in weights.items():
        tree.add(other, weight)
    assert tree.weight_before(place) == sum(weight for other, weight in weights.items() if other < place)


@given(st.dictionaries(PLACES, WEIGHTS, max_size=30), st.dictionaries(PLACES, WEIGHTS, max_size=30))
def test_sums_are_the_same_after_any_additions_and_removals(kept, gone):
    direct, indirect = SumTree(), SumTree()
    for place, weight in sorted(kept.items()):
        direct.add(place, weight)
    extra = {place: weight for place, weight in gone.items() if place not in kept}
    for place, weight in (*extra.items(), *kept.items()):
        indirect.add(place, weight)
    for place, weight in extra.items():
        assert indirect.remove(place) == weight
    assert indirect.levels == direct.levels
    assert indirect.total == direct.total


def test_a_place_at_a_weight_is_found_in_the_logarithm_of_the_number_of_places():
    """A search among a million places reads one node of each level, and all nodes of the top."""
    tree = SumTree()
    for place in range(0, 1 << 20, 64):
        tree.add(place, 1)
    read = SimpleNamespace(count=0)

    class Counted(dict[int, list[int]]):
        def __getitem__(self, key: int) -> list[int]:
            read.count += 1
            return super().__getitem__(key)

    tree.levels = tuple(Counted(level) for level in tree.levels)
    for weight in range(0, tree.total, 97):
        read.count = 0
        assert tree.place_at(weight) == weight * 64
        assert read.count <= len(tree.levels[-1]) + len(tree.levels)

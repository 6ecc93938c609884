"""The shelves against a plain list of what stands on them."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from headrace.trajectory import Task, Version
from headrace_orchestrator.scheduler.state.eligible.eligible_index import EligibleIndex, SumTree
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, Filter
from headrace_orchestrator.scheduler.state.versions import Versions

BOUND = 1

PLACES = st.one_of(st.integers(0, 70), st.integers(0, 1 << 40))
WEIGHTS = st.one_of(st.just(1), st.integers(1, 1 << 260))


class Standing:
    """A group as the shelves see it."""

    def __init__(self, order: int, task: Task, versions: list[Version], weight: int = 1) -> None:
        self.order = order
        self.task = task
        self.weight = weight
        self._versions = versions

    def versions(self) -> list[Version]:
        return self._versions


def shelves_of(groups: list[Standing], versions: Versions) -> EligibleIndex:
    eligible = EligibleIndex(BOUND, lambda group: group.weight)  # type: ignore[attr-defined]
    for group in groups:
        eligible.add(group, versions)  # type: ignore[arg-type]
    return eligible


@st.composite
def crowds(draw, lineages: int = 1) -> list[Standing]:
    orders = draw(st.lists(PLACES, unique=True, max_size=40))
    return [
        Standing(
            order,
            Task(environment=draw(st.sampled_from("ab")), seed=0, tags=draw(st.lists(st.sampled_from("xy")))),
            draw(st.lists(st.builds(Version, st.integers(0, lineages - 1), st.integers(0, 5)), max_size=2)),
            draw(WEIGHTS),
        )
        for order in orders
    ]


def now(n: int) -> Versions:
    versions = Versions()
    versions.announce(Version(0, n), None)
    return versions


def in_bound(group: Standing, versions: Versions, forks: list[int]) -> bool:
    """``forks``: from which n each lineage but the first was opened, always out of the one before."""
    last = dict(enumerate([*forks, versions.now.n + 99]))
    return all(
        version.n <= last.get(version.lineage, -1) and versions.now.n - version.n <= BOUND
        for version in group.versions()
    )


@given(st.dictionaries(PLACES, WEIGHTS, max_size=60), st.data())
def test_the_first_the_last_and_the_one_at_a_given_weight_are_found(weights, data):
    shelf = SumTree()
    for place, weight in weights.items():
        shelf.put(place, weight)
    ordered = sorted(weights)
    assert list(shelf.places()) == ordered
    assert list(shelf.places(backwards=True)) == ordered[::-1]
    if weights:
        wanted = data.draw(st.integers(0, sum(weights.values()) - 1))
        below = 0
        for place in ordered:
            below += weights[place]
            if wanted < below:
                break
        assert shelf.at(wanted) == place


@given(st.dictionaries(PLACES, WEIGHTS, max_size=30), st.dictionaries(PLACES, WEIGHTS, max_size=30))
def test_what_is_found_depends_on_what_stands_there_alone_never_on_how_it_came_there(kept, gone):
    straight, roundabout = SumTree(), SumTree()
    for place, weight in sorted(kept.items()):
        straight.put(place, weight)
    extra = {place: weight for place, weight in gone.items() if place not in kept}
    for place, weight in (*extra.items(), *kept.items()):
        roundabout.put(place, weight)
    for place, weight in extra.items():
        assert roundabout.take(place) == weight
    assert roundabout.levels == straight.levels
    assert roundabout.total == straight.total


@given(crowds(lineages=2), st.lists(st.integers(0, 7), max_size=4), st.integers(0, 7), st.integers(0, 3))
def test_what_the_version_now_leaves_behind_is_set_aside_and_never_chosen(crowd, ns, fork, after):
    """Versions are announced, one is gone back to, others follow; on the way some come back within bound."""
    versions = now(0)
    eligible = shelves_of(crowd, versions)
    for n in ns:
        versions.announce(Version(0, n), None)
        turned_to(eligible, crowd, versions, [])
    fork = min(fork, versions.now.n)
    versions.announce(Version(1, fork), Version(0, fork))
    turned_to(eligible, crowd, versions, [fork])
    versions.announce(Version(1, fork + after), None)
    turned_to(eligible, crowd, versions, [fork])


def turned_to(eligible: EligibleIndex, crowd: list[Standing], versions: Versions, forks: list[int]) -> None:
    eligible.turn_to(versions)
    fresh = sorted(group.order for group in crowd if in_bound(group, versions, forks))
    assert [group.order for group in eligible.in_order(EVERYTHING)] == fresh
    assert len(eligible) == len(fresh)
    assert {group.order for group in eligible.behind()} == {group.order for group in crowd} - set(fresh)
    assert eligible.contents() == shelves_of(crowd, versions).contents()


@given(crowds(), st.sets(st.sampled_from("ab")), st.sets(st.sampled_from("xy")))
def test_what_does_not_fit_is_never_chosen(crowd, environments, tags):
    eligible = shelves_of(crowd, now(0))
    filter = Filter.of(environments, tags)
    right = sorted(
        group.order
        for group in crowd
        if (not environments or group.task.environment in environments) and tags <= set(group.task.tags)
    )
    assert [group.order for group in eligible.in_order(filter)] == right
    assert [group.order for group in eligible.in_order(filter, backwards=True)] == right[::-1]
    assert eligible.count(filter) == len(right)
    with closing(eligible.drawn(filter, lambda bound: 0)) as drawn:
        assert sorted(group.order for group in drawn) == right


@given(crowds(), st.integers(0, 1 << 300), st.integers(0, 40))
def test_what_is_drawn_is_drawn_once_and_stands_there_again_after_the_draw(crowd, die, count):
    eligible = shelves_of(crowd, now(0))
    before = eligible.contents()
    with closing(eligible.drawn(EVERYTHING, lambda bound: die % bound)) as drawn:
        found = [group.order for group, _ in zip(drawn, range(count), strict=False)]
    assert len(set(found)) == len(found) == min(count, len(crowd))
    assert eligible.contents() == before


def test_choosing_a_few_looks_at_few():
    """Of a million places, one node is read on each level to find one, and those of the top."""
    shelf = SumTree()
    for place in range(0, 1 << 20, 64):
        shelf.put(place, 1)
    read = SimpleNamespace(count=0)

    class Counted(dict[int, list[int]]):
        def __getitem__(self, key: int) -> list[int]:
            read.count += 1
            return super().__getitem__(key)

    shelf.levels = tuple(Counted(level) for level in shelf.levels)
    for weight in range(0, shelf.total, 97):
        read.count = 0
        assert shelf.at(weight) == weight * 64
        assert read.count <= len(shelf.levels[-1]) + len(shelf.levels)

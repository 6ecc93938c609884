"""The index of eligible groups against a plain list of them."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from headrace.trajectory import Task, Version
from headrace_orchestrator.scheduler.state.eligible.eligible_index import EligibleIndex
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter
from headrace_orchestrator.scheduler.state.versions import Versions

BOUND = 1

PLACES = st.one_of(st.integers(0, 70), st.integers(0, 1 << 40))
WEIGHTS = st.one_of(st.just(1), st.integers(1, 1 << 260))


class IndexedGroup:
    """A group as the index reads it."""

    def __init__(self, order: int, task: Task, versions: list[Version], weight: int = 1) -> None:
        self.dispatch_order = order
        self.task = task
        self.weight = weight
        self._versions = versions

    def versions(self) -> list[Version]:
        return self._versions


def index_of(groups: list[IndexedGroup], versions: Versions) -> EligibleIndex:
    index = EligibleIndex(BOUND, lambda group: group.weight)  # type: ignore[attr-defined]
    for group in groups:
        index.add(group, versions)  # type: ignore[arg-type]
    return index


@st.composite
def group_lists(draw, lineages: int = 1) -> list[IndexedGroup]:
    orders = draw(st.lists(PLACES, unique=True, max_size=40))
    return [
        IndexedGroup(
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


def in_bound(group: IndexedGroup, versions: Versions, forks: list[int]) -> bool:
    """``forks``: the n from which each lineage but the first forked, always out of the one before."""
    last = dict(enumerate([*forks, versions.now.n + 99]))
    return all(
        version.n <= last.get(version.lineage, -1) and versions.now.n - version.n <= BOUND
        for version in group.versions()
    )


@given(group_lists(lineages=2), st.lists(st.integers(0, 7), max_size=4), st.integers(0, 7), st.integers(0, 3))
def test_groups_that_a_new_version_leaves_out_of_bound_are_set_aside_and_never_chosen(groups, ns, fork, after):
    """Versions are announced, then a rewind and more versions follow; some groups come back within bound."""
    versions = now(0)
    index = index_of(groups, versions)
    for n in ns:
        versions.announce(Version(0, n), None)
        check_after_update(index, groups, versions, [])
    fork = min(fork, versions.now.n)
    versions.announce(Version(1, fork), Version(0, fork))
    check_after_update(index, groups, versions, [fork])
    versions.announce(Version(1, fork + after), None)
    check_after_update(index, groups, versions, [fork])


def check_after_update(index: EligibleIndex, groups: list[IndexedGroup], versions: Versions, forks: list[int]) -> None:
    index.update_versions(versions)
    inside = sorted(group.dispatch_order for group in groups if in_bound(group, versions, forks))
    outside = {group.dispatch_order for group in groups} - set(inside)
    assert [group.dispatch_order for group in index.in_order(EVERYTHING)] == inside
    assert len(index) == len(inside)
    assert {group.dispatch_order for group in index.out_of_bound()} == outside
    assert index.contents() == index_of(groups, versions).contents()


@given(group_lists(), st.sets(st.sampled_from("ab")), st.sets(st.sampled_from("xy")))
def test_groups_that_do_not_fit_the_filter_are_never_chosen(groups, environments, tags):
    index = index_of(groups, now(0))
    filter = GroupFilter.of(environments, tags)
    right = sorted(
        group.dispatch_order
        for group in groups
        if (not environments or group.task.environment in environments) and tags <= set(group.task.tags)
    )
    assert [group.dispatch_order for group in index.in_order(filter)] == right
    assert [group.dispatch_order for group in index.in_order(filter, backwards=True)] == right[::-1]
    assert index.count(filter) == len(right)
    with closing(index.drawn(filter, lambda bound: 0)) as drawn:
        assert sorted(group.dispatch_order for group in drawn) == right


@given(group_lists(), st.integers(0, 1 << 300), st.integers(0, 40))
def test_a_group_is_drawn_once_and_is_in_the_index_again_after_the_draw(groups, number, count):
    index = index_of(groups, now(0))
    before = index.contents()
    with closing(index.drawn(EVERYTHING, lambda bound: number % bound)) as drawn:
        places = [group.dispatch_order for group, _ in zip(drawn, range(count), strict=False)]
    assert len(set(places)) == len(places) == min(count, len(groups))
    assert index.contents() == before

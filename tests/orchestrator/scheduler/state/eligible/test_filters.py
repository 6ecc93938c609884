"""Filters of pulls."""

from headrace.trajectory import Task
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter, kind_of

HARD = kind_of(Task(environment="game:A", seed=1, tags=["hard", "long"]))


def test_a_group_fits_if_the_filter_names_its_environment_and_it_has_every_tag_that_the_filter_names() -> None:
    assert GroupFilter.of(["game:A", "game:B"], ["long", "hard"]).fits(HARD)
    assert GroupFilter.of([], ["hard"]).fits(HARD)
    assert not GroupFilter.of(["game:B"], ["hard"]).fits(HARD)
    assert not GroupFilter.of(["game:A"], ["hard", "new"]).fits(HARD)


def test_a_filter_without_names_fits_every_group() -> None:
    assert GroupFilter.of([], []) == EVERYTHING
    assert EVERYTHING.fits(HARD)
    assert EVERYTHING.fits(kind_of(Task(environment="game:B", seed=1)))

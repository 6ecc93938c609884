"""What is kept of episodes and groups."""

from __future__ import annotations

import gc

from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.state.groups import HISTORY_STEPS, Episode
from tests.orchestrator.scheduler.harness import Harness, version


def test_of_the_members_of_a_complete_group_only_what_batches_are_made_of_is_kept(harness):
    harness.run(group_size=3, batch_size=3, max_staleness=1, short_groups="serve")
    first, second, third = harness.lease(3)
    harness.finish(third, low=version("0.0"), high=version("0.1"))
    harness.finish(first, "failed")
    harness.finish(second)
    group = harness.core.state.runs["r"].groups[first.group]
    assert (group.state, group.members) == ("eligible", [])
    assert group.trajectories == [f"trajectory of {attempt.episode}" for attempt in (second, third)]
    assert group.kept_versions == (version("0.0"), version("0.1"))
    assert not {first.episode, second.episode, third.episode} & harness.core.state.episodes.keys()
    assert harness.finish(first) == "superseded"  # the store knows whose the record is


def test_memory_grows_little_with_what_is_stored():
    def episodes(rounds: int) -> int:
        harness = Harness(checked=False)
        name = f"rounds-{rounds}"
        harness.run(name, group_size=8, batch_size=8 * 16, max_staleness=rounds)
        while harness.status(name).groups.eligible < 16 * rounds:
            for attempt in harness.lease(64):
                harness.finish(attempt)
        return sum(isinstance(found, Episode) and found.group.run == name for found in gc.get_objects())

    assert episodes(12) <= episodes(2) + 64


def test_so_many_groups_are_listed_that_nobody_waits(harness, monkeypatch):
    harness.run(group_size=1, batch_size=4)
    harness.work()
    whole = harness.core.groups("r")
    monkeypatch.setattr(views, "LISTED", 3)
    assert harness.core.groups("r") == whole[:3]


def test_a_story_keeps_its_last_steps(harness):
    harness.run(attempt_lease_s=30, batch_size=1)
    for _ in range(2 * HISTORY_STEPS):
        (attempt, *_) = harness.lease(1)
        harness.hand_back([attempt])
    history = harness.core.state.episodes[attempt.episode].history
    assert history == [("leased", "Dispatched"), ("queued", "handed back")] * (HISTORY_STEPS // 2)

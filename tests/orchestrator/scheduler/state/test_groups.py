"""Moves of episodes and groups, and the data kept of complete ones."""

from __future__ import annotations

import gc

import pytest

from headrace.errors import InternalError
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.groups import HISTORY_STEPS, TERMINAL, Episode
from tests.orchestrator.scheduler.harness import Harness, version


def test_a_complete_group_keeps_only_the_parts_of_its_members_that_batches_need(harness):
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


def test_memory_grows_little_with_the_stored_data():
    def episodes(rounds: int) -> int:
        harness = Harness(checked=False)
        name = f"rounds-{rounds}"
        harness.run(name, group_size=8, batch_size=8 * 16, max_staleness=rounds)
        while harness.status(name).groups.eligible < 16 * rounds:
            for attempt in harness.lease(64):
                harness.finish(attempt)
        return sum(isinstance(item, Episode) and item.group.run == name for item in gc.get_objects())

    assert episodes(12) <= episodes(2) + 64


def test_a_history_keeps_its_last_steps(harness):
    harness.run(attempt_lease_s=30, batch_size=1)
    for _ in range(2 * HISTORY_STEPS):
        (attempt, *_) = harness.lease(1)
        harness.hand_back([attempt])
    history = harness.core.state.episodes[attempt.episode].history
    assert history == [("leased", "Dispatched"), ("queued", "handed back")] * (HISTORY_STEPS // 2)


def test_an_illegal_move_raises_with_the_history_before_it(harness):
    harness.run(group_size=2)
    (attempt,) = harness.lease(1)
    harness.finish(attempt)
    core = harness.replayed()
    with pytest.raises(InternalError, match=r"from finished to queued by lost\. .*queued → leased \(Dispatched\)"):
        core.apply(
            events.AttemptEnded(run="r", episode=attempt.episode, attempt=1, reason="lost", counts=False), harness.now
        )


def test_terminal_is_terminal(harness):
    harness.run(group_size=4, max_staleness=0, batch_size=4)
    attempts = harness.lease(3)
    for attempt, status in zip(attempts, ("finished", "truncated", "failed"), strict=True):
        harness.finish(attempt, status)
    for status in ("finished", "truncated", "failed", "cancelled"):
        for attempt in attempts:
            outcome = harness.outcome(attempt, status)
            with pytest.raises(InternalError, match="cannot go from"):
                harness.replayed().apply(outcome, harness.now)
    assert {"finished", "truncated", "failed", "cancelled", "vanished"} == TERMINAL

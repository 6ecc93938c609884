"""Priorities of groups in prioritized draws."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict, InvalidRequest
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.scenarios import chosen_batches, eligible_harness


def test_a_priority_holds_until_it_is_set_again_and_a_group_starts_with_one():
    harness = eligible_harness("prioritized", groups=3, batch_size=1, max_uses=9)
    harness.prioritize({"g1": 1e6})
    batch = harness.batch()
    assert batch.groups == ["g1"]
    assert harness.prioritize({"g1": 1e-6, "g2": 1.0}).set == 2, "a group in a batch keeps it for its next use"
    harness.ack(batch)
    assert "g1" not in {id for batch in chosen_batches(harness, 200) for id in batch}


def test_groups_that_are_over_are_named_in_the_reply_and_the_others_are_set_anyway():
    harness = eligible_harness("prioritized", groups=3, batch_size=1)
    batch = harness.batch()
    harness.ack(batch)
    left = {"g0", "g1", "g2"} - set(batch.groups)
    reply = harness.prioritize(dict.fromkeys(["g0", "g1", "g2", "unknown"], 2.0))
    assert (reply.set, set(reply.over)) == (2, {"unknown", *batch.groups})
    assert [set(event.priorities) for event in harness.events_of(events.PrioritiesSet)] == [left]


@pytest.mark.parametrize("priority", [0.0, -1.0, 1e-7, 1e7, float("inf"), float("nan")])
def test_a_priority_that_cannot_be_a_weight_is_refused(priority):
    harness = eligible_harness("prioritized", groups=2)
    with pytest.raises(InvalidRequest, match="priorities must be between 1e-06 and 1e\\+06"):
        harness.prioritize({"g0": 2.0, "g1": priority})
    assert harness.events_of(events.PrioritiesSet) == []


def test_priorities_are_refused_where_no_draw_would_use_them():
    harness = eligible_harness("fifo", groups=2)
    with pytest.raises(Conflict, match="selects groups fifo: priorities would have no effect"):
        harness.prioritize({"g0": 2.0})


def test_priorities_come_back_after_a_replay():
    harness = eligible_harness("prioritized", batch_size=2)
    harness.prioritize({"g3": 7.5})
    assert harness.replayed().durable() == harness.core.durable()

"""Bounds that all runs share."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict
from headrace_orchestrator.scheduler.state.admission.bounds import RETRY_S, SharedBounds
from tests.orchestrator.scheduler.harness import Harness, codes

EPISODE = 4096
"""Estimated bytes of an episode before any record was stored."""


@pytest.fixture
def harness():
    harness = Harness(bounds=SharedBounds(max_held_bytes=10 * EPISODE, max_disk_bytes=1_000_000))
    yield harness
    assert harness.replayed().durable() == harness.core.durable()


def test_bytes_held_and_reserved_by_all_runs_together_stay_below_the_bound_of_the_service(harness):
    harness.run("a", batch_size=6, max_staleness=0)
    harness.run("b", batch_size=6, max_staleness=0)
    assert (harness.status("a").in_flight, harness.status("b").in_flight) == (6, 4)
    [reason] = [reason for reason in harness.empty(run="b").reasons if reason.code == "service-byte-bound"]
    assert reason.message == (
        "Groups in flight of all runs hold 0 bytes and 40960 more are reserved; the bound of the service is 40960. "
        "Admission stops until groups retire."
    )


def test_a_run_that_is_held_back_continues_soon_after_another_returned_room(harness):
    harness.run("a", batch_size=6, max_staleness=0)
    harness.run("b", batch_size=6, max_staleness=0)
    harness.core.close_run("a", harness.now)
    harness.settle()
    harness.advance(RETRY_S)
    assert harness.status("b").in_flight == 6


def test_bytes_stored_and_reserved_stay_below_the_bound_of_the_disk(harness):
    harness.core.bounds.disk_bytes = 1_000_000 - 3 * EPISODE
    harness.run(batch_size=6, max_staleness=0)
    assert harness.status().in_flight == 3
    assert "disk-bound" in codes(harness.empty())
    harness.core.bounds.disk_bytes = 0
    harness.advance(RETRY_S)
    assert harness.status().in_flight == 6


def test_submitted_groups_have_to_fit_the_shared_bounds(harness):
    harness.run(source="learner")
    harness.submit("g1", size=8)
    with pytest.raises(Conflict, match="the bounds of the service leave no room"):
        harness.submit("g2", size=3)


def test_an_admitted_attempt_may_always_be_handed_in(harness):
    harness.run(batch_size=2, max_staleness=0)
    attempts = harness.lease(2)
    harness.core.bounds.disk_bytes = 2_000_000
    assert [harness.finish(attempt) for attempt in attempts] == ["accepted", "accepted"]


def test_without_bounds_no_run_is_checked_again():
    harness = Harness()
    harness.run(batch_size=6, max_staleness=0)
    assert harness.core.next_deadline() is None

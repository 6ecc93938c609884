"""Announcements, staleness, rewinds."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchSuperseded,
    Conflict,
    InvalidRequest,
    VersionConflict,
    VersionUnknown,
)
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import version


def test_a_version_follows_the_one_before_in_its_lineage(harness):
    harness.run()
    assert harness.announce("0.3") == "0.3"
    assert harness.announce("0.3") == "0.3"
    assert len(harness.events_of(events.VersionAnnounced)) == 1
    for text, error in (("0.2", VersionConflict), ("1.4", VersionUnknown), ("new", InvalidRequest)):
        with pytest.raises(error):
            harness.announce(text)


def test_groups_that_an_announcement_leaves_too_far_behind_are_retired_as_a_unit(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0)
    attempts = harness.lease(1)
    harness.finish(attempts[0])
    leased = harness.lease(1)
    harness.announce("0.1")
    group = attempts[0].group
    assert harness.retired() == {group: "stale"}
    assert [event.episode for event in harness.events_of(events.AttemptCancelled)] == [leased[0].episode]
    harness.finish(leased[0], "cancelled")
    assert harness.ends(attempts[0].episode) == ["finished"], "it stays stored"
    harness.work()
    assert group not in harness.batch().groups


def test_a_queued_member_that_was_dispatched_before_ends_cancelled(harness):
    harness.run(group_size=3, batch_size=3, max_staleness=0)
    first, second = harness.lease(2)
    harness.hand_back([second])
    harness.announce("0.1")
    assert harness.ends(second.episode) == ["cancelled"]
    assert harness.finish(second, low=version("0.0")) == "superseded"
    harness.finish(first, "cancelled")
    assert len(harness.events_of(events.EpisodeEnded)) == 2


def test_a_result_that_is_too_old_when_it_comes_retires_its_group(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=1)
    harness.announce("0.5")
    attempts = harness.lease(2)
    assert harness.finish(attempts[0], low=version("0.3")) == "accepted"
    assert harness.retired() == {attempts[0].group: "stale"}


def test_a_rewind_opens_a_lineage(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=3)
    harness.announce("0.3")
    below = harness.lease(2)
    for attempt in below:
        harness.finish(attempt)
    harness.announce("0.4")
    above = harness.lease(2)
    for attempt in above:
        harness.finish(attempt)
    mixed = harness.lease(2)
    harness.finish(mixed[0], low=version("0.3"), high=version("0.4"))
    assert harness.rewind("0.3") == "1.3"
    assert harness.retired() == {above[0].group: "rewound", mixed[0].group: "rewound"}
    assert harness.batch().groups == [below[0].group]
    assert harness.announce("1.4") == "1.4"
    with pytest.raises(VersionConflict):
        harness.announce("0.5")


def test_a_rewind_dissolves_batches_with_such_a_group_and_acked_groups_stay_consumed(harness):
    harness.run(batch_size=1, max_staleness=3)
    harness.work()
    consumed, below = harness.batch(), harness.batch()
    harness.ack(consumed)
    harness.announce("0.1")
    harness.work()
    harness.ack(harness.batch())
    harness.ack(harness.batch())
    above = harness.batch()
    harness.rewind("0.0")
    assert [event.batch for event in harness.events_of(events.BatchDissolved)] == [above.id]
    with pytest.raises(BatchSuperseded):
        harness.ack(above)
    harness.ack(below)
    assert harness.retired()[consumed.groups[0]] == "acked"


def test_a_rewind_goes_only_to_versions_that_the_current_one_descends_from(harness):
    harness.run()
    harness.announce("0.4")
    harness.rewind("0.2")
    harness.announce("1.6")
    for text in ("0.3", "1.7", "2.0"):
        with pytest.raises(VersionUnknown):
            harness.rewind(text)
    assert harness.rewind("0.1") == "2.1"
    assert harness.rewind("0.1") == "3.1"


def test_distance_counts_along_the_path_from_the_current_version_back_to_the_root(harness):
    harness.run(group_size=1, batch_size=4, max_staleness=1)
    harness.announce("0.4")
    harness.rewind("0.4")
    a, b, c = harness.lease(3)
    harness.announce("1.5")
    assert harness.finish(a, low=version("0.4")) == "accepted"
    assert harness.retired() == {}
    assert harness.finish(b, low=version("0.3")) == "accepted"
    assert harness.retired() == {b.group: "stale"}
    assert harness.finish(c, low=version("0.5")) == "accepted"
    assert harness.retired() == {b.group: "stale", c.group: "rewound"}


def test_a_rewind_with_the_key_of_an_earlier_one_changes_nothing_and_gets_its_reply(harness):
    harness.run()
    for number in (1, 2, 3):
        harness.announce(f"0.{number}")
    first = harness.core.rewind("r", messages.RewindRequest(version="0.1", key="k"), harness.now)
    assert first.version == "1.1"
    harness.settle()
    harness.announce("1.2")
    harness.restart(harness.restored(harness.core.snapshot()))
    again = harness.core.rewind("r", messages.RewindRequest(version="0.1", key="k"), harness.now)
    assert (again.version, harness.settle()) == ("1.1", [])
    assert harness.status().version == "1.2"
    with pytest.raises(Conflict, match="another version"):
        harness.core.rewind("r", messages.RewindRequest(version="0.2", key="k"), harness.now)
    assert harness.core.rewind("r", messages.RewindRequest(version="0.1", key="other"), harness.now).version == "2.1"
    harness.settle()

"""Retirement in slices: no command waits for a million retirements, and no group that waits for its own is served."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import Conflict
from headrace.wire import messages
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.commands.pull_plan import Form
from tests.orchestrator.scheduler.harness import codes


@pytest.fixture(autouse=True)
def two_a_slice(monkeypatch):
    monkeypatch.setattr(follow_ups, "SLICE", 2)


def test_groups_that_a_new_version_leaves_behind_are_retired_in_slices_and_return_their_credit(harness):
    harness.run(group_size=1, batch_size=3, max_staleness=1)
    harness.work()
    harness.announce("0.1")
    begun = len(harness.log)
    harness.announce("0.2")
    for retired in (2, 4, 6):
        assert (len(harness.retired(begun)), harness.status().in_flight) == (retired, 6)  # admitted anew at once
        assert harness.core.next_deadline() == harness.now
        harness.core.tick(harness.now)
        harness.settle()
    assert set(harness.retired(begun).values()) == {"stale"}
    assert harness.core.next_deadline() > harness.now


def test_groups_that_wait_to_be_retired_are_not_served_and_a_rewind_brings_back_those_within_bound(harness):
    harness.run(group_size=1, batch_size=3, max_staleness=2)
    harness.work()
    for number in range(1, 4):
        harness.announce(f"0.{number}")
    assert harness.status().groups.eligible == 7
    assert codes(harness.empty())[0] == "all-stale"
    harness.rewind("0.1")
    assert len(harness.batch().groups) == 3


def test_an_awaited_group_that_waits_to_be_retired_is_not_served_but_ends(harness):
    harness.run(source="learner", group_size=1, max_staleness=0)
    ids = harness.submit(*(f"g{number}" for number in range(5)))
    harness.work()
    harness.announce("0.1")
    assert harness.status().groups.eligible == 3
    assert codes(harness.empty(groups=[ids[-1]])) == ["group-ended"]


def test_a_submitted_group_of_a_run_with_tasks_of_its_own_goes_stale_with_the_others(harness):
    harness.run(group_size=1, batch_size=1, max_staleness=0)
    harness.submit("mine")
    harness.work()
    harness.announce("0.1")
    assert harness.retired()["mine"] == "stale"


def test_groups_that_a_closed_run_leaves_behind_are_retired_in_slices(harness):
    harness.run(group_size=1, batch_size=1, max_staleness=5)
    harness.work()
    harness.core.close_run("r", harness.now)
    harness.settle()
    assert len(harness.retired()) == 2
    assert harness.status().groups.eligible == 4
    assert harness.empty().finished
    harness.restart()
    harness.catch_up()
    assert list(harness.retired().values()) == ["closed"] * 6
    assert harness.status().in_flight == 0


def test_a_batch_that_was_planned_before_its_run_was_closed_is_not_formed(harness):
    harness.run(group_size=1, batch_size=3, max_staleness=1)
    harness.work()
    request = messages.PullRequest(learner="l", session="s", request="r")
    plan = harness.core.pull("r", request, harness.now)
    assert isinstance(plan, Form)
    harness.core.close_run("r", harness.now)
    harness.settle()
    last = msgspec.structs.replace(plan, groups=plan.groups[-1:])
    assert harness.core.state.runs["r"].groups[last.groups[0][0]].state == "eligible"
    with pytest.raises(Conflict, match="closed"):
        harness.core.form("r", last, request, harness.now)


def test_slices_go_on_after_a_restart(harness):
    harness.run(group_size=1, batch_size=3, max_staleness=1)
    harness.work()
    harness.announce("0.1")
    harness.announce("0.2")
    harness.restart(harness.restored(harness.core.snapshot()))
    harness.catch_up()
    assert len(harness.retired()) == 6
    request = messages.PullRequest(learner="l", session="s", request="r")
    assert isinstance(harness.core.pull("r", request, harness.now), messages.EmptyReply)
    harness.settle()

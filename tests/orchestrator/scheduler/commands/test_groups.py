"""Groups that a learner submits."""

from __future__ import annotations

import pytest

from headrace.errors import (
    Conflict,
    GroupExists,
    InvalidRequest,
    UnknownGroup,
)
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import BROKEN, codes


def test_a_pull_of_an_awaited_group_that_ended_gets_a_reason(harness):
    harness.run(source="learner", batch_size=1, short_groups="serve")
    harness.submit("a", "b")
    attempts = harness.lease(2)
    harness.finish(attempts[0], "failed", failure=BROKEN)
    harness.finish(attempts[1])
    reply = harness.empty(groups=["a", "b"], wait_s=60.0)
    assert reply.finished
    (reason,) = reply.reasons
    failure = "environment/crashed: It raised."
    assert (reason.code, reason.facts) == ("group-ended", {"group": "a", "reason": "failed", "failure": failure})
    assert reason.message.endswith(failure)
    assert harness.batch(groups=["b"]).groups == ["b"]


def test_in_a_run_of_the_learners_tasks_any_pull_takes_submitted_groups(harness):
    harness.run(source="learner", batch_size=2)
    harness.submit("a", "b", "c")
    harness.work()
    assert harness.batch().groups == ["a", "b"]
    assert "collecting" in codes(harness.empty())


def test_in_a_run_with_tasks_of_its_own_submitted_groups_wait_for_a_pull_that_names_them(harness):
    harness.run(batch_size=2)
    harness.submit("a")
    harness.work()
    assert "a" not in harness.batch().groups
    assert harness.batch(groups=["a"]).groups == ["a"]


def test_groups_are_submitted_all_or_none(harness):
    harness.run(source="learner")
    assert len(harness.submit("a", "")) == 2
    with pytest.raises(GroupExists):
        harness.submit("b", "a")
    with pytest.raises(InvalidRequest, match="1 to 4096 episodes"):
        harness.submit("b", size=0)
    with pytest.raises(InvalidRequest, match="The task is invalid"):
        harness.core.submit_groups("r", [messages.GroupRequest(task={"seed": 1})], harness.now)
    assert len(harness.core.groups("r")) == 2
    with pytest.raises(UnknownGroup):
        harness.pull(groups=["b"])
    with pytest.raises(InvalidRequest):
        harness.pull(groups=[])


def test_a_group_may_have_a_size_of_its_own(harness):
    harness.run(source="learner", group_size=8)
    harness.submit("a", size=3)
    assert len(harness.lease(8)) == 3


def test_a_group_that_only_pulls_by_name_may_take_is_served_once(harness):
    harness.run(max_uses=3, batch_size=1)
    harness.submit("g")
    harness.work()
    harness.ack(harness.batch(groups=["g"]))
    assert harness.retired() == {"g": "acked"}


def test_the_bytes_held_reserved_and_requested_must_fit_the_byte_bound_together(harness):
    harness.run(source="learner", max_bytes=30_000)
    with pytest.raises(Conflict, match=r"hold 0 bytes and 0 more are reserved; these 8 episodes .* at 32768"):
        harness.submit(*[f"g{number}" for number in range(8)])
    assert harness.events_of(events.GroupAdmitted) == []
    harness.submit(*[f"g{number}" for number in range(7)])


def test_one_request_admits_a_limited_number_of_episodes(harness):
    harness.checked = False
    harness.run(batch_size=1)
    with pytest.raises(InvalidRequest, match="at most 16384 episodes; this one has 16390"):
        harness.submit("a", "b", "c", "d", "e", size=3278)
    with pytest.raises(InvalidRequest, match="at most 16384 episodes; this one has 16386"):
        harness.evaluate(6, episodes_per_task=2731)
    assert len(harness.submit("a", "b", size=4096)) == 2


def test_a_group_of_a_quarantined_task_ends_at_once_with_the_reason_the_others_are_admitted(harness):
    harness.run(source="learner", group_size=1, retries={"quarantine_after": 1})
    harness.submit("bad")
    harness.finish(*harness.lease(1), status="failed")
    assert harness.status().quarantined == 1
    harness.submit("again", "good")
    reply = harness.pull(groups=["again", "good"])
    assert [reason.facts["group"] for reason in reply.reasons] == ["again"]
    assert "(quarantined)" in reply.reasons[0].message
    assert "environment/crashed: It raised." in reply.reasons[0].message
    assert harness.work() == 1
    assert harness.pull(groups=["good"]).groups == ["good"]

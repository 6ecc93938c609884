"""Dispatch while the policy servers have older versions than the learner."""

from __future__ import annotations

from headrace.trajectory import Version
from headrace.wire.messages import Weights
from headrace_orchestrator.scheduler.commands.policy_servers import weights_served
from headrace_orchestrator.scheduler.state.admission import failure_backoff
from tests.orchestrator.scheduler.harness import Harness, codes

SERVER = "http://127.0.0.1:8471"
OLD = {"low": Version(0, 0), "servers": [SERVER]}


def outdated(harness: Harness, **spec: object) -> None:
    """A run at version 0.2 whose server still serves 0.0, as a result shows."""
    harness.run(**{"batch_size": 2, "max_staleness": 1, **spec})
    harness.announce("0.1")
    harness.announce("0.2")
    (attempt,) = harness.lease(1)
    harness.finish(attempt, **OLD)


def test_a_run_without_a_learner_gets_work_for_all_slots_at_version_zero(harness: Harness):
    harness.run(batch_size=4, max_staleness=1)
    first, *others = harness.lease(3)
    harness.finish(first, **OLD)
    assert len(harness.lease(64)) == 8 - 1 - len(others)
    assert "policy-outdated" not in codes(harness.empty())


def test_while_no_server_has_a_version_that_could_be_served_one_attempt_at_a_time_is_granted(harness: Harness):
    outdated(harness)
    granted = 0
    for _ in range(200):
        attempts = harness.lease(64)
        assert len(attempts) <= 1
        granted += len(attempts)
        for attempt in attempts:
            harness.finish(attempt, **OLD)
        harness.advance(0.1)
    assert 1 < granted < 50, "at growing intervals"


def test_the_reason_names_the_version_of_each_server(harness: Harness):
    outdated(harness)
    reason = next(reason for reason in harness.empty().reasons if reason.code == "policy-outdated")
    assert reason.message == (
        f"No policy server has a version that may be trained on: {SERVER} serves 0.0; the run is at 0.2, and "
        "max_staleness is 1. Load the weights of a version before its ack, or ack with `weights`. Until then one "
        "attempt at a time is made."
    )
    assert reason.facts["servers"] == {SERVER: "0.0"}


def test_one_result_of_a_version_that_could_be_served_lifts_it_at_once(harness: Harness):
    outdated(harness)
    assert harness.lease(64) == []
    harness.advance(failure_backoff.LONGEST_S)
    (single,) = harness.lease(64)
    harness.finish(single, low=Version(0, 1), servers=[SERVER])
    assert "policy-outdated" not in codes(harness.empty())
    assert harness.lease(64)


def test_a_server_that_reports_such_a_version_lifts_it_without_a_try(harness: Harness):
    outdated(harness)
    assert not harness.lease(64)
    harness.core.state.runs["r"].policy_servers.probed = {SERVER: Version(0, 2)}
    assert len(harness.lease(64)) == 4


def test_one_server_of_several_that_is_up_to_date_is_enough(harness: Harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.announce("0.1")
    harness.announce("0.2")
    new, old = harness.lease(2)
    harness.finish(new, low=Version(0, 2), servers=["http://127.0.0.1:8472"])
    harness.finish(old, **OLD)
    assert "policy-outdated" not in codes(harness.empty())
    assert len(harness.lease(64)) == 3


def test_a_restarted_service_knows_the_versions_of_the_servers(harness: Harness):
    outdated(harness)
    harness.restart(harness.restored(harness.core.snapshot()))
    assert "policy-outdated" in codes(harness.empty())
    assert not harness.lease(64)


def test_while_the_servers_load_a_version_no_more_groups_begin_than_can_be_served_in_time(harness: Harness):
    harness.run(group_size=2, batch_size=4, max_staleness=1)
    harness.work()
    harness.announce("0.1", path="w1")
    batch = harness.batch()
    harness.ack(batch)
    assert harness.lease(64) == [], "two of the four groups in flight are left, and their version is one behind"
    harness.ack(harness.batch())
    begun = harness.lease(64)
    assert len({attempt.group for attempt in begun}) == 2
    harness.lease(1)
    state, run = harness.core.state, harness.core.state.runs["r"]
    weights_served(state, run, Version(0, 1), Weights(path="w1"), harness.now)
    harness.settle()
    assert len({attempt.group for attempt in harness.lease(64)}) == 2


def test_a_group_that_has_begun_is_completed_while_the_servers_are_behind(harness: Harness):
    harness.run(group_size=4, batch_size=4, max_staleness=1)
    (first,) = harness.lease(1)
    harness.announce("0.1", path="w1")
    assert [attempt.group for attempt in harness.lease(64)] == [first.group] * 3


def test_a_learner_that_waits_gets_one_group_at_a_time_though_the_servers_stay_behind(harness: Harness):
    harness.run(environments=[{"id": "game:A"}, {"id": "game:B"}], batch_size=1, max_staleness=1, seed=3)
    harness.announce("0.1")
    for _ in range(200):
        reply = harness.pull(environments=["game:B"], wait_s=10.0)
        if not hasattr(reply, "reasons"):
            return
        for attempt in harness.lease(64):
            harness.finish(attempt, **OLD)
    raise AssertionError(reply)

"""The credit ledger, the one more group, and why there is nothing."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict, InvalidRequest
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import codes


@pytest.mark.parametrize(
    ("group_size", "batch_size", "max_staleness", "capacity"), [(16, 100, 1, 14), (8, 20, 0, 3), (1, 32, 0, 32)]
)
def test_admission_goes_on_while_groups_in_flight_are_fewer_than_the_credit(
    harness, group_size, batch_size, max_staleness, capacity
):
    harness.run(group_size=group_size, batch_size=batch_size, max_staleness=max_staleness)
    status = harness.status()
    assert (status.in_flight, status.credit, status.queued) == (capacity, 0, capacity * group_size)


def test_for_a_token_budget_the_groups_of_a_batch_are_what_recent_groups_say_it_takes(harness):
    harness.run(batch_size=1, batch_tokens=1000, max_staleness=1)
    assert harness.status().in_flight == 2
    for attempt in harness.lease(2):
        harness.finish(attempt, row_tokens=250)
    assert harness.status().in_flight == 8
    for attempt in harness.lease(6):
        harness.finish(attempt, row_tokens=300)
    batch = harness.batch()
    assert len(batch.groups) == 3, "250 + 250 + 300, and 300 more do not fit"


def test_a_group_larger_than_the_token_budget_is_served_alone(harness):
    harness.run(batch_size=1, batch_tokens=1000)
    attempts = harness.lease(2)
    for attempt in attempts:
        harness.finish(attempt, row_tokens=5000)
    assert harness.batch().groups == [attempts[0].group]


def test_bytes_are_reserved_from_admission_on(harness):
    harness.run(batch_size=64, max_bytes=40_960)
    assert harness.status().in_flight == 10
    attempts = harness.lease(10)
    for attempt in attempts[:5]:
        harness.finish(attempt, size_bytes=100)
    assert harness.status().in_flight == 15
    harness.finish(attempts[5], size_bytes=9000)
    assert harness.status().in_flight == 15
    reasons = harness.empty().reasons
    message = next(reason.message for reason in reasons if reason.code == "byte-bound")
    assert message.startswith("Groups in flight hold 9500 bytes and 81000 more are reserved; the bound is 40960.")


def test_submitted_groups_draw_no_credit_only_bytes(harness):
    harness.run(batch_size=2, max_bytes=100_000)
    harness.submit(*[f"g{number}" for number in range(20)])
    assert harness.status().in_flight == 4
    with pytest.raises(Conflict, match="The bound is 100000"):
        harness.submit("one more")


def test_what_is_held_reserved_and_asked_for_has_to_fit_the_byte_bound_together(harness):
    harness.run(source="learner", max_bytes=30_000)
    with pytest.raises(Conflict, match=r"hold 0 bytes and 0 more are reserved; these 8 episodes .* at 32768"):
        harness.submit(*[f"g{number}" for number in range(8)])
    assert harness.found(events.GroupAdmitted) == []
    harness.submit(*[f"g{number}" for number in range(7)])


def test_one_request_admits_so_many_episodes_and_no_more(harness):
    harness.checked = False
    harness.run(batch_size=1)
    with pytest.raises(InvalidRequest, match="at most 16384 episodes; this one asks for 16390"):
        harness.submit("a", "b", "c", "d", "e", size=3278)
    with pytest.raises(InvalidRequest, match="at most 16384 episodes; this one wants 16386"):
        harness.evaluate(6, episodes_per_task=2731)
    assert len(harness.submit("a", "b", size=4096)) == 2


def test_a_group_that_retires_gives_its_credit_and_bytes_back_at_once(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=1, max_bytes=40_000)
    harness.lease(3)
    harness.announce("0.2")
    status = harness.status()
    assert (status.in_flight, status.groups.retired) == (2, {"stale": 2})
    assert status.queued == 4


def test_an_empty_answer_always_has_a_reason(harness):
    harness.run(batch_size=6, pool="x")
    reply = harness.empty()
    assert codes(reply) == ["no-workers", "collecting"]
    assert reply.reasons[0].message == "no workers in pool 'x': 12 episodes queued"
    assert reply.reasons[0].facts == {"pool": "x", "queued": 12, "workers": 0}
    harness.lease(2, pool="x")
    reply = harness.empty()
    assert codes(reply) == ["collecting"]
    assert reply.reasons[0].message == "0 of 6 groups ready; 2 episodes at workers, 10 queued."
    assert not reply.finished


def test_workers_without_the_capabilities_do_not_count(harness):
    harness.run(batch_size=1, capabilities=["reasoning-gym"])
    harness.lease(2)
    expected = "no workers in pool 'default' that offer ['reasoning-gym']: 2 episodes queued"
    assert harness.empty().reasons[0].message == expected


def test_draining_workers_are_named(harness):
    harness.run(batch_size=1)
    harness.lease(1)
    harness.core.drain_worker("w", harness.now)
    harness.settle()
    assert "all 1 worker in pool 'default' drain" in harness.empty().reasons[0].message


def test_holding_k_batches_needs_max_staleness_of_at_least_k_minus_1_and_the_reason_says_so(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.batch()
    harness.batch()
    reply = harness.empty()
    assert "batches-held" in codes(reply)
    assert reply.reasons[0].message == ("2 batches held unacked. To hold 3, max_staleness must be at least 2; it is 1.")


def test_more_groups_than_a_batch_needs_are_not_so_many_of_few(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    said = harness.status().reasons[-1].message
    assert said == "4 groups ready, a batch needs 2; 0 episodes at workers, 0 queued."


def test_a_held_batch_that_staleness_allows_is_not_said_to_need_more_of_it(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.batch()
    said = next(reason.message for reason in harness.status().reasons if reason.code == "batches-held")
    assert said.startswith("1 batch held unacked. Nothing more is admitted")


def _shrunk(harness):
    """A run whose groups were large for long, and then one is small: its credit is too little for a batch."""
    harness.run(batch_size=1, batch_tokens=900, max_staleness=0)
    for _ in range(40):
        harness.finish(harness.lease(1)[0], row_tokens=1000)
        harness.ack(harness.batch())
    harness.finish(harness.lease(1)[0], row_tokens=100)
    assert harness.status().in_flight == 1


def test_a_pull_on_an_idle_run_admits_one_more_group(harness):
    _shrunk(harness)
    for _ in range(2):
        assert not harness.empty().finished
        assert harness.status().in_flight == 2, "only one: then it is not idle"
    harness.finish(harness.lease(1)[0], row_tokens=800)
    assert len(harness.batch().groups) == 2


def test_a_held_batch_blocks_the_one_more_group(harness):
    harness.run(batch_size=1, batch_tokens=1000, max_staleness=0)
    harness.finish(harness.lease(1)[0], row_tokens=1000)
    harness.batch()
    in_flight = harness.status().in_flight
    assert "batches-held" in codes(harness.empty())
    assert harness.status().in_flight == in_flight


def test_the_byte_bound_blocks_the_one_more_group(harness):
    harness.run(batch_size=4, max_staleness=0, max_bytes=10_000)
    while attempts := harness.lease(4):
        for attempt in attempts:
            harness.finish(attempt, size_bytes=6000)
    in_flight = harness.status().in_flight
    assert codes(harness.empty()) == ["byte-bound"]
    assert harness.status().in_flight == in_flight == 3


def test_stale_groups_are_named_as_the_reason(harness):
    harness.run(batch_size=2, max_staleness=1)
    harness.work()
    harness.announce("0.2")
    reply = harness.empty()
    assert "all-stale" in codes(reply)
    message = next(reason.message for reason in reply.reasons if reason.code == "all-stale")
    assert message == "4 groups went stale since the last batch: more than 1 versions behind 0.2."


def test_a_run_without_submitted_groups_says_so(harness):
    harness.run(source="learner")
    assert codes(harness.empty()) == ["no-tasks"]


def test_a_closed_run_is_finished_for_good(harness):
    harness.run(group_size=2, batch_size=2)
    attempts = harness.lease(3)
    for attempt in attempts[:2]:
        harness.finish(attempt)
    held = harness.batch()
    harness.core.close_run("r", harness.now)
    harness.core.close_run("r", harness.now)
    harness.settle()
    reply = harness.empty()
    assert (codes(reply), reply.finished) == (["closed"], True)
    assert harness.status().state == "closed"
    assert held.groups
    assert [c.record for c in harness.heartbeat().cancels] == [True]
    assert harness.finish(attempts[2], "cancelled") == "accepted"
    assert harness.lease(4) == []
    with pytest.raises(Conflict):
        harness.submit("g")
    with pytest.raises(Conflict):
        harness.evaluate()

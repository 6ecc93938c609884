"""The credit ledger."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict


@pytest.mark.parametrize(
    ("group_size", "batch_size", "max_staleness", "capacity"), [(16, 100, 1, 14), (8, 20, 0, 3), (1, 32, 0, 32)]
)
def test_admission_continues_while_groups_in_flight_are_fewer_than_the_credit(
    harness, group_size, batch_size, max_staleness, capacity
):
    harness.run(group_size=group_size, batch_size=batch_size, max_staleness=max_staleness)
    status = harness.status()
    assert (status.in_flight, status.credit, status.queued) == (capacity, 0, capacity * group_size)


def test_for_a_token_budget_the_groups_of_a_batch_are_estimated_from_recent_groups(harness):
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


def test_a_group_that_retires_gives_its_credit_and_bytes_back_at_once(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=1, max_bytes=40_000)
    harness.lease(3)
    harness.announce("0.2")
    status = harness.status()
    assert (status.in_flight, status.groups.retired) == (2, {"stale": 2})
    assert status.queued == 4

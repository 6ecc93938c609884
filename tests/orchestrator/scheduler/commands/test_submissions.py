"""Verdicts on submissions."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import InvalidTrajectory, VersionUnknown
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import FLAKY, version


def test_an_unknown_episode_is_superseded(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    assert harness.finish(msgspec.structs.replace(attempt, episode="long gone")) == "superseded"


def test_a_wrong_nonce_or_another_worker_is_not_yours(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    assert harness.finish(attempt, nonce="guessed") == "not-yours"
    assert harness.finish(attempt, worker="thief") == "not-yours"
    assert harness.finish(msgspec.structs.replace(attempt, attempt=2)) == "not-yours"
    assert harness.finish(attempt) == "accepted"


def test_a_repeated_submission_is_a_duplicate_and_changes_nothing(harness):
    harness.run(group_size=2)
    (attempt,) = harness.lease(1)
    assert harness.finish(attempt) == "accepted"
    before = harness.core.durable()
    assert harness.finish(attempt, "failed") == "duplicate"
    assert harness.finish(attempt, nonce="guessed") == "superseded"
    assert harness.core.durable() == before


def test_a_retryable_failure_is_queued_again_at_the_front_until_the_budget_is_spent(harness):
    harness.run(retries={"max_attempts": 3, "quarantine_after": 9}, short_groups="serve")
    episode = ""
    for number in range(1, 4):
        attempt = harness.lease(1)[0]
        assert attempt.episode == (episode or attempt.episode)
        episode = attempt.episode
        expected = "retrying" if number < 3 else "accepted"
        assert harness.finish(attempt, "failed", failure=FLAKY) == expected
    assert harness.ends(episode) == ["failed"]


def test_a_result_of_an_expired_attempt_that_was_not_granted_again_is_accepted(harness):
    harness.run(attempt_lease_s=30)
    first, second, third = harness.lease(3)
    harness.advance(200.0)
    assert harness.status().leased == 0
    assert harness.finish(second, "failed", failure=FLAKY) == "retrying"
    assert harness.finish(first) == "accepted"
    harness.restart()
    assert harness.finish(third) == "accepted"
    assert harness.finish(first) in ("duplicate", "superseded")


def test_an_outage_of_three_lease_terms_reruns_nothing(harness):
    harness.run(attempt_lease_s=30)
    attempts = harness.lease(8)
    harness.now += 90.0
    harness.restart()
    harness.now += 29.0
    harness.heartbeat()
    harness.advance(29.0)
    for attempt in attempts:
        assert harness.finish(attempt) == "accepted"
    assert harness.events_of(events.AttemptEnded) == []


def test_any_result_of_a_cancelled_attempt_is_its_one_result(harness):
    harness.run(group_size=4, max_staleness=0, batch_size=4)
    attempts = harness.lease(4)
    harness.announce("0.1")
    low = version("0.0")
    assert harness.finish(attempts[0], "finished", low=low) == "accepted"
    assert harness.finish(attempts[1], "cancelled") == "accepted"
    assert harness.finish(attempts[2], "failed", failure=FLAKY) == "accepted"
    assert harness.finish(attempts[3], "truncated", low=low) == "accepted"
    assert harness.finish(attempts[0], low=low) == "superseded"
    assert [harness.ends(a.episode) for a in attempts] == [["finished"], ["cancelled"], ["failed"], ["truncated"]]
    assert harness.status().groups.eligible == 0


def test_rows_may_carry_versions_that_were_announced_or_the_next_one(harness):
    harness.run(group_size=4)
    harness.announce("0.5")
    a, b, c, _ = harness.lease(4)
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("0.7"))
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("0.5"), high=version("0.7"))
    with pytest.raises(VersionUnknown):
        harness.finish(a, low=version("1.5"))
    assert harness.finish(a, low=version("0.6")) == "accepted"
    assert harness.finish(b, low=version("0.4"), high=version("0.6")) == "accepted"
    assert harness.finish(c, low=None) == "accepted"


def test_a_trajectory_that_names_another_group_is_refused(harness):
    harness.run()
    (attempt,) = harness.lease(1)
    with pytest.raises(InvalidTrajectory, match="it was granted as member 0"):
        harness.finish(msgspec.structs.replace(attempt, group="another"))


def test_a_trajectory_that_contradicts_its_grant_is_refused(harness):
    harness.run()
    harness.evaluate()
    trained, evaluated = sorted(harness.lease(2, slots=4), key=lambda attempt: attempt.evaluation)
    for attempt, fields in (
        (trained, {"task": evaluated.task}),
        (trained, {"evaluation": evaluated.evaluation}),
        (trained, {"by_worker": False}),
        (evaluated, {"evaluation": ""}),
    ):
        with pytest.raises(InvalidTrajectory):
            harness.finish(attempt, **fields)
    assert [harness.finish(attempt) for attempt in (trained, evaluated)] == ["accepted", "accepted"]

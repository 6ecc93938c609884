"""Evaluations: start, report, deadline, weight sync."""

from __future__ import annotations

import pytest

from headrace.errors import (
    Conflict,
    InvalidRequest,
    InvalidTrajectory,
    UnknownEvaluation,
    VersionUnknown,
)
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply import runs
from tests.orchestrator.scheduler.harness import version


def test_a_weight_sync_waits_for_evaluations_of_the_version_that_is_served(harness):
    harness.run()
    assert harness.core.sync_hold("r", harness.now) == (0.0, [])
    one = harness.evaluate(deadline_s=30.0)
    two = harness.evaluate(deadline_s=50.0)
    assert harness.core.sync_hold("r", harness.now) == (50.0, [one, two])
    harness.advance(30.0)
    assert harness.core.sync_hold("r", harness.now) == (20.0, [two])
    harness.advance(20.0)
    assert harness.core.sync_hold("r", harness.now) == (0.0, [])


def test_a_newer_version_may_be_announced_meanwhile(harness):
    harness.run(batch_size=1)
    evaluation = harness.evaluate(2, deadline_s=30.0)
    attempts = [a for a in harness.lease(8, slots=8) if a.evaluation]
    harness.announce("0.1")
    assert harness.core.sync_hold("r", harness.now) == (0.0, [])
    harness.finish(attempts[0], low=version("0.0"))
    harness.advance(30.0)
    harness.finish(attempts[1], "cancelled")
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.done, report.wanted, report.finished) == (1, 2, True)


def test_evaluation_episodes_are_outside_the_ledger_and_in_no_batch(harness):
    harness.run(batch_size=2, max_staleness=0)
    evaluation = harness.evaluate(3, episodes_per_task=2, temperature=0.0)
    assert harness.status().in_flight == 2
    attempts = [a for a in harness.lease(8) if a.evaluation]
    assert {(a.evaluation, a.pinned_version, a.temperature) for a in attempts} == {(evaluation, "0.0", 0.0)}
    for attempt in attempts:
        harness.finish(attempt, rewards={"agent": 0.5})
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.wanted, report.done, report.finished, report.hold_s) == (6, 6, True, 0.0)
    assert {line.reward for line in report.episodes} == {0.5}
    assert harness.status().episodes == {}
    assert [event.reason for event in harness.events_of(events.EvaluationEnded)] == ["done"]


def test_a_trajectory_of_an_evaluation_with_another_version_is_refused(harness):
    harness.run(batch_size=1)
    harness.announce("0.3")
    harness.evaluate(1)
    attempt = next(a for a in harness.lease(8) if a.evaluation)
    with pytest.raises(InvalidTrajectory, match=r"pinned to version 0\.3, and has a turn of version 0\.2"):
        harness.finish(attempt, low=version("0.2"))


def test_episodes_that_are_not_over_at_the_deadline_are_cancelled(harness):
    harness.run(batch_size=1, attempt_lease_s=30)
    evaluation = harness.evaluate(1, episodes_per_task=12, deadline_s=20.0)
    running = [a for a in harness.lease(8) if a.evaluation]
    assert 0 < len(running) < 12
    harness.advance(20.0)
    assert {c.episode for c in harness.heartbeat().cancels} == {a.episode for a in running}
    harness.advance(30.0)
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.wanted, report.done, report.finished) == (12, 0, True)
    assert len(report.episodes) == len(running), "an episode that was never dispatched leaves no line"
    assert [event.reason for event in harness.events_of(events.EvaluationEnded)] == ["deadline"]


def test_an_evaluation_whose_episodes_were_all_cancelled_before_its_deadline_ends_as_cancelled(harness):
    harness.run(batch_size=1)
    harness.evaluate(1)
    (attempt,) = [a for a in harness.lease(8) if a.evaluation]
    harness.finish(attempt, "cancelled")
    assert [event.reason for event in harness.events_of(events.EvaluationEnded)] == ["cancelled"]


def test_old_evaluations_are_forgotten_once_their_lines_are_too_many(monkeypatch, harness):
    monkeypatch.setattr(runs, "REMEMBERED_LINES", 5)
    harness.run()
    ids = []
    for _ in range(3):
        ids.append(harness.evaluate(2, episodes_per_task=1, deadline_s=900.0))
        harness.work()
    assert list(harness.core.state.runs["r"].evaluations) == ids[1:]
    with pytest.raises(UnknownEvaluation):
        harness.core.evaluation("r", ids[0], harness.now)


def test_an_evaluation_that_runs_is_never_forgotten(harness):
    harness.checked = False
    harness.run(tasks=[])
    first = harness.evaluate()
    (running,) = harness.lease(1)
    over = harness.evaluate()
    for _ in range(256):
        (attempt,) = harness.lease(1)
        harness.finish(attempt)
        harness.evaluate()
    assert not harness.core.evaluation("r", first, harness.now).finished
    with pytest.raises(UnknownEvaluation):
        harness.core.evaluation("r", over, harness.now)
    harness.finish(running)
    assert harness.core.evaluation("r", first, harness.now).finished


def test_an_evaluation_needs_tasks_and_a_known_version(harness):
    harness.run()
    harness.announce("0.2")
    for request, error in (
        ({"tasks": 0}, InvalidRequest),
        ({"episodes_per_task": 0}, InvalidRequest),
        ({"deadline_s": 0.0}, InvalidRequest),
        ({"version": "0.3"}, VersionUnknown),
        ({"version": "1.0"}, VersionUnknown),
    ):
        with pytest.raises(error):
            harness.evaluate(**request)
    assert harness.core.evaluation("r", harness.evaluate(version="0.1"), harness.now).hold_s == 0.0
    with pytest.raises(UnknownEvaluation):
        harness.core.evaluation("r", "none", harness.now)


def test_a_request_with_the_key_of_an_earlier_evaluation_gets_that_one(harness):
    harness.run(batch_size=4)
    assert harness.evaluate(2, key="nightly") == "nightly"
    harness.announce("0.1")
    admitted = len(harness.events_of(events.GroupAdmitted))
    assert harness.evaluate(2, key="nightly") == "nightly"
    harness.restart()
    assert harness.evaluate(2, key="nightly") == "nightly"
    assert len(harness.events_of(events.EvaluationStarted)) == 1
    assert len(harness.events_of(events.GroupAdmitted)) == admitted
    with pytest.raises(Conflict, match="with other tasks"):
        harness.evaluate(3, key="nightly")
    assert harness.evaluate(2) != harness.evaluate(2), "without a key each is a new one"

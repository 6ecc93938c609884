"""Submitted groups, evaluations, and a run's own tasks."""

from __future__ import annotations

import random

import pytest

from headrace.errors import (
    GroupExists,
    InvalidRequest,
    InvalidTrajectory,
    RunExists,
    UnknownEvaluation,
    UnknownGroup,
    UnknownRun,
    VersionUnknown,
)
from headrace.runspec import RunSpec
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply import runs
from tests.orchestrator.scheduler.harness import BROKEN, Harness, codes, version


def test_a_pull_that_names_groups_is_served_exactly_these_once_complete(harness):
    harness.run(source="learner", group_size=2, batch_size=8)
    harness.submit("a", "b", "c")
    assert codes(harness.empty(groups=["c", "a"])) == ["no-workers", "collecting"]
    harness.work()
    assert harness.batch(groups=["c", "a"]).groups == ["c", "a"]
    assert harness.batch(groups=["b"]).groups == ["b"]
    reply = harness.empty(groups=["a"])
    assert reply.reasons[0].code == "batches-held"


def test_an_awaited_group_that_ended_is_a_typed_failure_never_silence(harness):
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


def test_in_a_run_of_the_learners_tasks_a_plain_pull_takes_submitted_groups(harness):
    harness.run(source="learner", batch_size=2)
    harness.submit("a", "b", "c")
    harness.work()
    assert harness.batch().groups == ["a", "b"]
    assert "collecting" in codes(harness.empty())


def test_in_a_run_with_tasks_of_its_own_submitted_groups_wait_for_who_names_them(harness):
    harness.run(batch_size=2)
    harness.submit("a")
    harness.work()
    assert "a" not in harness.batch().groups
    assert harness.batch(groups=["a"]).groups == ["a"]


def test_awaited_groups_do_not_hang_in_a_batch_that_nobody_pulls(harness):
    harness.run(source="learner", batch_size=2)
    harness.submit("a", "b")
    harness.work()
    harness.nack(harness.batch())
    assert harness.batch(groups=["a"]).groups == ["a"]
    assert harness.batch(groups=["b"]).groups == ["b"]


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


def test_a_weight_sync_waits_for_evaluations_of_the_version_now(harness):
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
    assert [event.reason for event in harness.found(events.EvaluationEnded)] == ["done"]


def test_an_evaluation_record_of_another_version_is_refused(harness):
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
    assert len(report.episodes) == len(running), "what was never dispatched leaves no line"
    assert [event.reason for event in harness.found(events.EvaluationEnded)] == ["deadline"]


def test_an_evaluation_whose_episodes_were_all_cancelled_before_its_deadline_ends_as_cancelled(harness):
    harness.run(batch_size=1)
    harness.evaluate(1)
    (attempt,) = [a for a in harness.lease(8) if a.evaluation]
    harness.finish(attempt, "cancelled")
    assert [event.reason for event in harness.found(events.EvaluationEnded)] == ["cancelled"]


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


def test_a_group_that_only_pulls_by_name_may_take_is_served_once(harness):
    harness.run(max_uses=3, batch_size=1)
    harness.submit("g")
    harness.work()
    harness.ack(harness.batch(groups=["g"]))
    assert harness.retired() == {"g": "acked"}


def test_an_evaluation_needs_tasks_and_a_version_that_was(harness):
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


def test_a_running_evaluation_is_named_as_a_reason(harness):
    harness.run(batch_size=4)
    harness.evaluate(1, deadline_s=90.0)
    harness.lease(2)
    message = next(reason.message for reason in harness.empty().reasons if reason.code == "evaluation-hold")
    assert message.endswith("1 of 1 episodes are not over; it ends in 90 s at the latest.")


def test_a_run_is_made_once_and_unknown_ones_are_said_to_be(harness):
    harness.run("a")
    with pytest.raises(RunExists):
        harness.run("a")
    with pytest.raises(UnknownRun):
        harness.status("b")
    assert harness.core.run_names() == ["a"]
    assert harness.core.spec("a") == RunSpec(name="a", environments=[{"id": "game:A"}])


def test_a_status_counts_groups_episodes_and_rewards(harness):
    harness.run(group_size=2, batch_size=2)
    attempts = harness.lease(4)
    for number, attempt in enumerate(attempts[:3]):
        harness.finish(attempt, rewards={"a": 1.0, "b": float(number)})
    status = harness.status()
    assert (status.groups.open, status.groups.eligible, status.episodes) == (1, 1, {"finished": 3})
    assert (status.mean_reward, status.leased, status.queued) == (2.0, 1, 0)
    pages = harness.core.groups("r")
    assert [(p["state"], len(p["members"]), len(p["trajectories"]), p["low"]) for p in pages] == [
        ("eligible", 0, 2, "0.0"),
        ("open", 2, 0, "0.0"),
    ]


def test_what_a_run_draws_depends_on_its_seed_and_the_position_alone():
    def admitted(slots: int, seed: int) -> list[events.GroupAdmitted]:
        harness = Harness()
        mixture = [{"id": "game:A", "weight": 1.0}, {"id": "game:B", "weight": 3.0}]
        harness.run(environments=mixture, seed=seed, batch_size=50, group_size=2)
        while harness.status().batches_acked < 4:
            harness.work(slots=slots)
            harness.ack(harness.batch())
        return harness.found(events.GroupAdmitted)[:100]

    one, two, other = admitted(3, 1), admitted(64, 1), admitted(64, 2)
    assert [event.task for event in one] == [event.task for event in two]
    seeds = [[member.sampling_seed for member in event.members] for event in one]
    assert seeds == [[member.sampling_seed for member in event.members] for event in two]
    assert len({seed for pair in seeds for seed in pair}) == 200
    assert [event.task for event in one] != [event.task for event in other]
    assert 60 < sum(event.task.environment == "game:B" for event in one) < 90


def test_a_list_is_gone_through_in_order_as_often_as_its_epochs_say(harness):
    tasks = [{"environment": "game:A", "seed": seed, "id": name} for seed, name in ((5, "x"), (3, ""), (9, "z"))]
    harness.run(tasks=tasks, epochs=3, batch_size=64)
    admitted = harness.found(events.GroupAdmitted)
    assert [(event.task.id, event.task.seed) for event in admitted] == [("x", 5), ("1", 3), ("z", 9)] * 3
    assert [event.position for event in admitted] == list(range(9))


def test_nothing_global_is_drawn_from(harness):
    before = random.getstate()
    harness.run(batch_size=64)
    harness.submit("g")
    harness.work()
    assert random.getstate() == before

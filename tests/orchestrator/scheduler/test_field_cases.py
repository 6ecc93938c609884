"""Field cases G01, G02, G03 and G05, as far as the core can show them."""

from __future__ import annotations

import random

import pytest

from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import Harness, ServedBatch, codes, version


def test_G01_finished_work_is_never_counted_as_running(harness):  # noqa: N802
    harness.checked = False
    harness.run(group_size=5, batch_size=35, max_staleness=1, max_uses=1, max_concurrent=1000)
    attempts = harness.lease(100)
    assert len(attempts) == 70
    assert len({attempt.group for attempt in attempts}) == 14
    stale_heartbeat = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in attempts]
    for attempt in attempts:
        assert harness.finish(attempt) == "accepted"
    draw = random.Random(7938)
    pending: list[messages.Assignment] = []
    for number in range(1, 1001):
        batch = harness.batch()
        assert len(batch.groups) == 7

        def old_heartbeat(keys=tuple(stale_heartbeat)):
            before = harness.core.durable()
            reply = harness.heartbeat(holding=list(keys))
            assert harness.core.durable() == before
            submitted = {key.episode for key in keys} - {attempt.episode for attempt in pending}
            over = {cancel.episode for cancel in reply.cancels if cancel.reason == "over" and not cancel.record}
            assert over == submitted

        def submit():
            for attempt in pending:
                assert harness.finish(attempt, low=harness.core.version("r")) == "accepted"
            pending.clear()

        def ack(batch=batch):
            harness.ack(batch)

        def announce(n=number):
            harness.announce(f"0.{n}")

        steps = [old_heartbeat, submit, ack, announce]
        draw.shuffle(steps)
        for step in steps:
            step()
        harness.core.check()
        assert not pending
        status = harness.status()
        assert (status.in_flight, status.credit) == (14, 0)
        assert sum((status.groups.open, status.groups.eligible, status.groups.leased)) == 14
        granted = harness.lease(100)
        assert len(granted) == 35
        assert len({attempt.group for attempt in granted}) == 7
        stale_heartbeat = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in granted]
        pending.extend(granted)


def test_G02_a_half_dispatched_stale_group_retires_as_a_unit(harness):  # noqa: N802
    harness.run(group_size=8, batch_size=8, max_staleness=1)
    leased = harness.lease(3)
    (group,) = {attempt.group for attempt in leased}
    begun = len(harness.log)
    harness.announce("0.1")
    assert harness.retired() == {}
    harness.announce("0.2")
    assert harness.retired() == {group: "stale"}
    cancelled = {event.episode for event in harness.events_of(events.AttemptCancelled)}
    assert cancelled == {attempt.episode for attempt in leased}
    assert harness.status().in_flight == 2
    reply = harness.heartbeat()
    assert [(c.reason, c.record) for c in reply.cancels] == [("stale", True)] * 3
    # One member had its result in the same moment; two stop.
    assert harness.finish(leased[0], low=version("0.0")) == "accepted"
    assert harness.finish(leased[1], "cancelled") == "accepted"
    assert harness.finish(leased[2], "cancelled") == "accepted"
    ended = [event for event in harness.events_of(events.EpisodeEnded, begun) if event.group == group]
    assert sorted(event.status for event in ended) == ["cancelled", "cancelled", "finished"]
    dispatched = {grant.episode for event in harness.events_of(events.Dispatched) for grant in event.grants}
    assert {event.episode for event in ended} <= dispatched
    harness.work()
    batch = harness.batch(wait_s=10)
    assert group not in batch.groups
    assert harness.status().groups.retired == {"stale": 1}
    members = [event for event in harness.events_of(events.GroupAdmitted) if event.group == batch.groups[0]]
    assert len(members[0].members) == 8


@pytest.mark.parametrize("seed", range(25))
def test_G02_wherever_the_announcement_falls_no_group_waits_for_members_that_cannot_come(harness, seed):  # noqa: N802
    harness.run(group_size=8, batch_size=8, max_staleness=1)
    draw = random.Random(seed)
    number = 0
    for dispatched in range(8):
        before = len(harness.log)
        in_flight = {group["id"]: group for group in harness.core.groups("r")}
        leased = harness.lease(dispatched) if dispatched else []
        number += 2
        lucky = draw.choice(leased) if leased else None
        moment = draw.randrange(3)
        if lucky and moment == 0:
            harness.finish(lucky, low=version(f"0.{number - 2}"))
        harness.announce(f"0.{number - 1}")
        if lucky and moment == 1:
            harness.finish(lucky, low=version(f"0.{number - 2}"))
        harness.announce(f"0.{number}")
        if lucky and moment == 2:
            assert harness.finish(lucky, low=version(f"0.{number - 2}")) == "accepted"
        for attempt in leased:
            if attempt is not lucky:
                assert harness.finish(attempt, "cancelled") == "accepted"
        touched = {attempt.group for attempt in leased}
        assert {group for group, reason in harness.retired(before).items() if reason == "stale"} == touched
        for attempt in leased:
            assert len(harness.ends(attempt.episode)) == 1
        ended = {event.episode for event in harness.events_of(events.EpisodeEnded, before)}
        assert ended == {attempt.episode for attempt in leased}
        assert all(len(group["members"]) == 8 for group in harness.core.groups("r"))
        assert len(in_flight) == len(harness.core.groups("r")) == 2
    harness.work()
    assert len(harness.batch().groups) == 1


def _evaluation_case(harness: Harness, run_for_s: float) -> str:
    harness.run(group_size=4, batch_size=16, max_staleness=1, attempt_lease_s=5)
    for n in range(1, 5):
        harness.announce(f"0.{n}")
    evaluation = harness.evaluate(32, deadline_s=run_for_s)
    assert harness.core.sync_hold("r", harness.now) == (run_for_s, [evaluation])
    return evaluation


def test_G03_a_weight_sync_waits_for_an_evaluation_no_longer_than_its_deadline(harness):  # noqa: N802
    evaluation = _evaluation_case(harness, 30.0)
    stalled = harness.lease(8, slots=8)
    assert {attempt.pinned_version for attempt in stalled} == {"0.4"} | {""}
    assert sum(attempt.evaluation == evaluation for attempt in stalled) == 2
    harness.advance(10.0)
    assert harness.core.sync_hold("r", harness.now) == (20.0, [evaluation])
    harness.advance(20.0)
    assert harness.core.sync_hold("r", harness.now) == (0.0, [])


def test_G03_overtaken_versions_are_skipped_and_the_learner_goes_on(harness):  # noqa: N802
    evaluation = _evaluation_case(harness, 60.0)
    slow = [a for a in harness.lease(8, slots=8) if a.evaluation]
    harness.advance(1.0)
    while True:
        attempts = harness.lease(6, slots=8)
        if not attempts:
            break
        for attempt in attempts:
            low = version("0.4") if attempt.evaluation else None
            harness.finish(attempt, **({"low": low} if low else {}))
        harness.heartbeat()
        if harness.status().groups.eligible >= 4:
            break
    harness.ack(harness.batch(), "0.7")
    assert harness.status().version == "0.7"
    assert harness.core.sync_hold("r", harness.now) == (0.0, [])
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.version, report.finished) == ("0.4", False)
    for attempt in slow:
        assert harness.finish(attempt, low=version("0.4")) == "accepted"


def test_G03_an_evaluation_that_stalls_reads_27_of_32(harness):  # noqa: N802
    evaluation = _evaluation_case(harness, 30.0)
    attempts = [a for a in harness.lease(200, slots=200) if a.evaluation]
    assert len(attempts) == 32
    for attempt in attempts[:27]:
        assert harness.finish(attempt, low=version("0.4")) == "accepted"
    for _ in range(15):
        harness.advance(2.0)
        harness.heartbeat()
    harness.advance(5.0)
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.done, report.wanted, report.finished) == (27, 32, True)
    cancelled = [line for line in report.episodes if line.status == "cancelled"]
    assert len(cancelled) == 5
    assert {line.failure.kind for line in cancelled if line.failure} == {"deadline"}
    assert not harness.events_of(events.BatchFormed)


TASKS = [{"environment": "game:A", "seed": seed} for seed in range(4)]


def test_G05_a_the_odd_tail_is_served_with_its_true_size(harness):  # noqa: N802
    harness.run(tasks=TASKS[:3], group_size=1, batch_size=2)
    harness.work(slots=4)
    first = harness.batch()
    assert harness.task_ids(first) == ["0", "1"]
    harness.ack(first, "0.1")
    second = harness.batch()
    assert harness.task_ids(second) == ["2"]
    harness.ack(second, "0.2")
    _assert_exhausted(harness)
    assert harness.status().state == "finished"


def test_G05_a_without_partial_batches_the_tail_is_named(harness):  # noqa: N802
    harness.run(tasks=TASKS[:3], group_size=1, batch_size=2, partial_batches=False)
    harness.work(slots=4)
    harness.ack(harness.batch(), "0.1")
    reply = harness.empty(wait_s=60)
    assert reply.finished
    assert [reason.message for reason in reply.reasons] == ["1 group left, batch needs 2, tasks exhausted"]
    assert harness.status().state == "finished"


def test_G05_b_an_even_list_gives_two_batches(harness):  # noqa: N802
    harness.run(tasks=TASKS, group_size=1, batch_size=2)
    served = _drink(harness)
    assert served == [["0", "1"], ["2", "3"]]
    _assert_exhausted(harness)


def test_G05_c_an_empty_list_is_exhausted_at_the_first_pull(harness):  # noqa: N802
    harness.run(tasks=[], group_size=1, batch_size=2)
    _assert_exhausted(harness)
    assert harness.status().state == "finished"


def test_G05_d_two_epochs_serve_every_task_exactly_twice(harness):  # noqa: N802
    harness.run(tasks=TASKS[:3], epochs=2, group_size=1, batch_size=2)
    served = [task for batch in _drink(harness) for task in batch]
    assert sorted(served) == ["0", "0", "1", "1", "2", "2"]
    _assert_exhausted(harness)


def test_G05_e_a_restart_after_the_first_ack_changes_nothing(harness):  # noqa: N802
    harness.run(tasks=TASKS[:3], group_size=1, batch_size=2)
    harness.work(slots=4)
    harness.ack(harness.batch(), "0.1")
    harness.restart()
    harness.work(slots=4)
    tail = harness.batch()
    assert harness.task_ids(tail) == ["2"]
    harness.ack(tail, "0.2")
    _assert_exhausted(harness)
    assert len(harness.events_of(events.GroupAdmitted)) == 3


@pytest.mark.parametrize(("short_groups", "sizes"), [("top_up", [3, 3, 3]), ("serve", [2, 3, 3])])
def test_G05_f_a_broken_group_is_topped_up_or_served_with_its_real_size(harness, short_groups, sizes):  # noqa: N802
    harness.run(tasks=TASKS[:3], group_size=3, batch_size=6, short_groups=short_groups)
    attempts = harness.lease(4)
    assert harness.finish(attempts[0], "failed") == "accepted"
    for attempt in attempts[1:]:
        harness.finish(attempt)
    harness.work(slots=4)
    finished = []
    while isinstance(batch := harness.pull(), ServedBatch):
        for group in batch.groups:
            ended = [r for r in harness.events_of(events.EpisodeEnded) if r.group == group and r.status == "finished"]
            finished.append(len(ended))
        harness.ack(batch)
    assert finished == sizes
    _assert_exhausted(harness)


def _drink(harness: Harness) -> list[list[str]]:
    served: list[list[str]] = []
    while True:
        harness.work(slots=4)
        batch = harness.pull()
        if not isinstance(batch, ServedBatch):
            return served
        served.append(harness.task_ids(batch))
        harness.ack(batch, f"0.{len(served)}")


def _assert_exhausted(harness: Harness) -> None:
    for wait_s in (0.0, 60.0):
        reply = harness.empty(wait_s=wait_s)
        assert reply.finished
        assert codes(reply) == ["tasks-exhausted"]
        assert reply.reasons[0].message == "tasks exhausted"
    assert harness.lease(4) == []

"""Snapshots: contents, restore, refusal."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import CorruptRecord, InternalError
from headrace.trajectory import Failure
from headrace_orchestrator.scheduler import snapshot
from headrace_orchestrator.scheduler.apply.groups import MAX_FAILURE
from headrace_orchestrator.scheduler.state.admission.ledger import Ledger
from headrace_orchestrator.scheduler.state.batches import OpenBatch
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import Episode, Group
from headrace_orchestrator.scheduler.state.policy_servers import PolicyServersState
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.task_shares import TaskShares
from headrace_orchestrator.scheduler.state.versions import Versions
from tests.orchestrator.scheduler.harness import BROKEN, Harness
from tests.orchestrator.scheduler.scenarios import busy_harness


def test_a_restored_scheduler_has_the_same_durable_state_and_makes_the_same_decisions():
    lived, restored = busy_harness(), busy_harness()
    lived.restart()
    restored.restart(restored.restored(restored.core.snapshot()))
    for harness in (lived, restored):
        harness.advance(20.0)
        harness.work()
        harness.ack(harness.batch("another"), "1.2")
        harness.lease(5)
        harness.advance(45.0)
    assert restored.log == lived.log
    assert restored.core.durable() == lived.core.durable()


def test_a_snapshot_from_before_digests_is_read():
    harness = busy_harness()
    stored = msgspec.msgpack.decode(harness.core.snapshot())

    def without_digests(value):
        """Drop the last field of each row of policy servers: the addresses by whether they drain come first."""
        if not isinstance(value, list):
            return value
        if len(value) == 9 and isinstance(value[0], dict) and isinstance(value[8], dict):
            return value[:8]
        return [without_digests(item) for item in value]

    old = without_digests(stored)
    assert old != stored
    assert harness.restored(msgspec.msgpack.encode(old)).policy_servers("r").digests == {}


def test_after_a_restore_every_lease_has_a_full_term_as_after_a_replay():
    harness = busy_harness()
    taken = harness.core.snapshot()
    harness.now += 500.0
    core = harness.restored(taken)
    for passed in (0.0, 10.0, 20.0, 29.0):
        core.tick(harness.now + passed)
    assert core.drain() == []
    core.tick(harness.now + 30.0)
    assert core.drain()


def test_events_behind_a_snapshot_are_applied_to_it():
    harness = busy_harness()
    taken, since = harness.core.snapshot(), len(harness.log)
    harness.work()
    harness.advance(31.0)
    assert len(harness.log) > since
    assert harness.restored(taken, since).durable() == harness.core.durable()


def test_a_snapshot_holds_quarantine_kills_and_the_recent_failures(harness):
    harness.run(group_size=2, batch_size=2, retries={"max_attempts": 1, "quarantine_after": 2})
    for attempt in harness.lease(3):
        harness.finish(attempt, "failed", failure=BROKEN)
    run = harness.core.state.runs["r"]
    again = harness.restored(harness.core.snapshot()).state.runs["r"]
    assert all((run.quarantined, run.kills, run.recent_failures))
    assert (again.quarantined, again.kills, list(again.recent_failures)) == (
        run.quarantined,
        run.kills,
        list(run.recent_failures),
    )


def test_a_snapshot_taken_in_the_middle_of_a_replay_is_finished_as_the_replay_is(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0, attempt_lease_s=30)
    harness.lease(1)
    harness.announce("0.1")
    harness.work()
    harness.ack(harness.batch(), "0.2")
    for end in range(1, len(harness.log)):
        cut = harness.replayed(harness.log[:end])
        core = harness.restored(cut.snapshot())
        for each in (cut, core):
            each.tick(harness.now)
            each.check()
        assert [type(event) for event in core.drain()] == [type(event) for event in cut.drain()]


def test_a_snapshot_holds_the_failures_of_awaited_groups(harness):
    harness.run(source="learner", batch_size=1, short_groups="serve")
    harness.submit("a")
    harness.finish(harness.lease(1)[0], "failed", failure=Failure(layer="policy", kind="long", message="x" * 10_000))
    (reason,) = harness.empty(groups=["a"]).reasons
    assert reason.facts["failure"].startswith("policy/long: xxx")
    assert len(reason.facts["failure"]) == MAX_FAILURE
    again = harness.restored(harness.core.snapshot()).state.runs["r"]
    assert again.submitted_failures == {"a": reason.facts["failure"]}


def test_a_snapshot_of_an_unknown_format_is_refused_and_named():
    taken = busy_harness().core.snapshot()
    other = taken[:1] + bytes([snapshot.FORMAT + 7]) + taken[2:]  # behind the head of an array
    with pytest.raises(CorruptRecord, match=f"format {snapshot.FORMAT + 7}"):
        Harness().core.restore(other, 0.0)


def test_a_damaged_snapshot_is_refused_as_a_whole():
    taken = busy_harness().core.snapshot()
    for length in range(0, len(taken), 7):
        core = Harness().core
        with pytest.raises(CorruptRecord):
            core.restore(taken[:length], 0.0)
        assert core.run_names() == []
    core = Harness().core
    before, _, after = taken.rpartition(b"\xa4id")  # an attempt that a worker holds
    with pytest.raises(CorruptRecord, match="KeyError"):
        core.restore(before + b"\xa4xx" + after, 0.0)
    assert core.run_names() == []


def test_a_snapshot_is_taken_between_commands_and_restored_into_a_fresh_scheduler():
    harness = busy_harness()
    with pytest.raises(InternalError, match="only into a new scheduler"):
        harness.core.restore(harness.core.snapshot(), 0.0)
    harness.core.close_run("r", harness.now)
    with pytest.raises(InternalError, match="to be drained first"):
        harness.core.snapshot()


SOFT = {
    Episode: {"begun", "deadline"},
    Group: {"begun_at", "failed_attempts"},
    OpenBatch: {"deadline"},
    Evaluation: {"deadline", "expired", "reported_at"},
    Ledger: set(),
    Versions: set(),
    PolicyServersState: {"reasons", "probed"},
    TaskShares: set(),
    Run: {
        "concurrency_cap",
        "estimator_failure",
        "failure_backoff",
        "failure_streak",
        "lost_attempts",
        "cut_deadlines",
        "learners",
        "retiring",
        "selection_failure",
    },
}
BY_REFERENCE = {
    Episode: {"group"},
    Group: {"run", "evaluation", "members"},
    OpenBatch: {"groups"},
    Evaluation: {"groups"},
    Ledger: {"bounds", "spec"},
    Versions: set(),
    PolicyServersState: set(),
    TaskShares: set(),
    Run: {
        "active_evaluations",
        "batches",
        "capabilities",
        "eligible",
        "eligible_by_name",
        "episodes",
        "evaluation_queue",
        "evaluations",
        "groups",
        "has_own_source",
        "in_progress",
        "ledger",
        "name",
        "open_groups",
        "plain_spec",
        "policy_servers",
        "queue",
        "shares",
        "source",
        "spec",
        "task_kinds",
        "undecided",
        "versions",
    },
}
ROWS = {
    Episode: snapshot.EpisodeRow,
    Group: snapshot.GroupRow,
    OpenBatch: snapshot.BatchRow,
    Evaluation: snapshot.EvaluationRow,
    Ledger: snapshot.LedgerRow,
    Versions: snapshot.VersionsRow,
    PolicyServersState: snapshot.PolicyServersRow,
    TaskShares: snapshot.SharesRow,
    Run: snapshot.RunRow,
}


@pytest.mark.parametrize("kind", list(ROWS), ids=lambda kind: kind.__name__)
def test_soft_state_is_not_in_it_and_each_slot_of_the_state_is_either_stored_or_listed_as_soft(kind):
    slots = set(vars(busy_harness().core.state.runs["r"])) if kind is Run else set(kind.__slots__)
    assert set(ROWS[kind].__struct_fields__) == slots - SOFT[kind] - BY_REFERENCE[kind]

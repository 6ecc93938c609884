"""Counts of groups drawn and trained on, by environment and tag."""

from __future__ import annotations

import pytest

from headrace.trajectory import Task
from headrace.wire.messages import TaskShare
from headrace_orchestrator.scheduler.state import task_shares
from headrace_orchestrator.scheduler.state.task_shares import TaskShares
from tests.orchestrator.scheduler.harness import Harness


def test_a_group_counts_as_drawn_at_its_admission_and_as_trained_at_the_first_ack_of_its_batch(harness: Harness):
    environments = [{"id": "game:A", "tags": ["hard"]}]
    harness.run(environments=environments, batch_size=2, max_staleness=1, max_uses=2)
    harness.work()
    harness.batch()
    drawn = TaskShare(kind="environment", name="game:A", drawn=4)
    assert harness.status().shares == [drawn, TaskShare(kind="tag", name="hard", drawn=4)]
    for _ in range(2):
        harness.ack(harness.batch())
    harness.restart(harness.restored(harness.core.snapshot()))
    assert [share.trained for share in harness.status().shares] == [2, 2], "the second use of a group counts no more"


def test_evaluations_are_not_counted(harness: Harness):
    harness.run(source="learner")
    harness.evaluate(2)
    assert harness.status().shares == []
    harness.submit("g")
    assert [(share.name, share.drawn) for share in harness.status().shares] == [("game:A", 1)]


def test_environments_and_tags_beyond_a_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task_shares, "MAX_NAMES", 2)
    shares = TaskShares()
    for number in range(5):
        task = Task(environment="game:A", seed=0, id="", tags=[f"t{number}"])
        shares.count_drawn(task)
        shares.count_trained(task)
    assert shares.listed() == [
        TaskShare(kind="environment", name="game:A", drawn=5, trained=5),
        TaskShare(kind="tag", name="other", drawn=4, trained=4),
        TaskShare(kind="tag", name="t0", drawn=1, trained=1),
    ]

"""Runs are found by their deadlines and by their queued episodes, without a look at every run.

That the indexes agree with the runs is checked after each command of every test with a checked harness.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headrace_orchestrator.scheduler.commands import leases
from headrace_orchestrator.scheduler.core import Scheduler
from tests.orchestrator.scheduler.harness import Harness

RUNS = 200


def with_runs(count: int) -> Harness:
    harness = Harness(checked=False)
    for number in range(count):
        harness.run(f"r{number}", batch_size=4, group_size=4)
    return harness


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Counter[str]) -> None:
    """Count the calls of a function."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls[name] += 1
        return original(*args)

    monkeypatch.setattr(owner, name, call)


def test_a_lease_looks_only_at_the_runs_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    harness = with_runs(RUNS)
    harness.core.next_deadline()
    counted(monkeypatch, leases, "_room", calls)
    counted(monkeypatch, Scheduler, "_deadline_of", calls)
    for number in range(20):
        assert len(harness.lease(1, f"w{number}")) == 1
        harness.core.next_deadline()
    assert calls["_room"] <= 40
    assert calls["_deadline_of"] <= 40


def test_slots_go_to_the_runs_with_the_fewest_leased_episodes_whatever_their_number() -> None:
    harness = with_runs(RUNS)
    first = Counter(attempt.run for attempt in harness.lease(RUNS, "w"))
    assert set(first.values()) == {1}
    assert len(first) == RUNS
    second = Counter(attempt.run for attempt in harness.lease(RUNS + 10, "v"))
    assert sorted(second.values()) == [1] * (RUNS - 10) + [2] * 10


def test_a_deadline_of_any_run_is_the_next_one() -> None:
    harness = with_runs(RUNS)
    harness.run("brief", environments=[{"id": "game:B"}], pool="other", attempt_lease_s=5.0)
    harness.lease(1, "w", pool="other")
    before = harness.now
    harness.advance(4.0)
    assert [event for event in harness.log if type(event).__name__ == "AttemptEnded"] == []
    ended = [event for event in harness.advance(1.5) if type(event).__name__ == "AttemptEnded"]
    assert [event.run for event in ended] == ["brief"]
    assert harness.now == before + 5.5

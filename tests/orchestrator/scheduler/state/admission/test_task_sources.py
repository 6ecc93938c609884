"""A run's own tasks."""

from __future__ import annotations

import random

from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state import run as run_state
from headrace_orchestrator.scheduler.state.admission.task_sources import source_of, task_key
from tests.orchestrator.scheduler.harness import Harness


def test_the_draws_of_a_run_depend_on_its_seed_and_the_position_alone():
    def admitted(slots: int, seed: int) -> list[events.GroupAdmitted]:
        harness = Harness()
        mixture = [{"id": "game:A", "weight": 1.0}, {"id": "game:B", "weight": 3.0}]
        harness.run(environments=mixture, seed=seed, batch_size=50, group_size=2)
        while harness.status().batches_acked < 4:
            harness.work(slots=slots)
            harness.ack(harness.batch())
        return harness.events_of(events.GroupAdmitted)[:100]

    one, two, other = admitted(3, 1), admitted(64, 1), admitted(64, 2)
    assert [event.task for event in one] == [event.task for event in two]
    seeds = [[member.sampling_seed for member in event.members] for event in one]
    assert seeds == [[member.sampling_seed for member in event.members] for event in two]
    assert len({seed for pair in seeds for seed in pair}) == 200
    assert [event.task for event in one] != [event.task for event in other]
    assert 60 < sum(event.task.environment == "game:B" for event in one) < 90


def test_a_list_is_used_in_order_once_for_each_of_its_epochs(harness):
    tasks = [{"environment": "game:A", "seed": seed, "id": name} for seed, name in ((5, "x"), (3, ""), (9, "z"))]
    harness.run(tasks=tasks, epochs=3, batch_size=64)
    admitted = harness.events_of(events.GroupAdmitted)
    assert [(event.task.id, event.task.seed) for event in admitted] == [("x", 5), ("1", 3), ("z", 9)] * 3
    assert [event.position for event in admitted] == list(range(9))


def test_quarantined_tasks_are_skipped_and_the_work_of_it_is_bounded_by_the_tasks_of_a_list_whatever_its_epochs():
    keys_compared = 0

    class Quarantined(set[bytes]):
        def __contains__(self, key: object) -> bool:
            nonlocal keys_compared
            keys_compared += 1
            return super().__contains__(key)

    tasks = [{"environment": "game:A", "seed": seed} for seed in (0, 1, 2, 3)]
    source = source_of(RunSpec(name="r", tasks=tasks, epochs=1_000_000_000))
    all_tasks = [source.next_task(position, ())[1] for position in range(4)]
    quarantined = Quarantined()
    for dead, following in ((1, [0, 2, 2, 3, 4]), (3, [0, 2, 2, 4, 4]), (0, [2, 2, 2, 6, 6]), (2, [None] * 5)):
        quarantined.add(task_key(all_tasks[dead]))
        found = [source.next_task(position, quarantined) for position in range(5)]
        assert [upcoming and upcoming[0] for upcoming in found] == following
        assert all(upcoming is None or upcoming[1] == all_tasks[upcoming[0] % 4] for upcoming in found)
    assert source.next_task(3_999_999_999, quarantined) is None
    assert keys_compared < 60


def test_a_list_whose_tasks_are_all_quarantined_ends_the_run_at_once(harness):
    harness.run(tasks=[{"environment": "game:A"}], epochs=1_000_000_000, group_size=1)
    for _ in range(3):
        (attempt,) = harness.lease(1)
        harness.finish(attempt, "failed")
    reply = harness.pull()
    assert reply.finished
    assert "tasks-exhausted" in [reason.code for reason in reply.reasons]


def test_quarantined_tasks_of_a_mixture_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(run_state, "REMEMBERED", 5)
    harness = Harness()
    harness.run(group_size=1, retries={"quarantine_after": 1})
    for _ in range(9):
        (attempt,) = harness.lease(1)
        harness.finish(attempt, "failed")
    run = harness.core.state.runs["r"]
    assert (len(run.quarantined), len(run.kills)) == (5, 5)
    assert len(harness.events_of(events.TaskQuarantined)) == 9


def test_no_global_generator_is_used(harness):
    before = random.getstate()
    harness.run(batch_size=64)
    harness.submit("g")
    harness.work()
    assert random.getstate() == before

"""A run's own tasks."""

from __future__ import annotations

import random

from headrace_orchestrator.scheduler import events
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


def test_no_global_generator_is_used(harness):
    before = random.getstate()
    harness.run(batch_size=64)
    harness.submit("g")
    harness.work()
    assert random.getstate() == before

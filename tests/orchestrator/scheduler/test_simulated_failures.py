"""Lists with broken tasks, in simulated time: the good tasks are trained on nearly as fast as without the broken ones.

A fleet of 32 slots asks for work as workers do. A good episode takes half a second, and an attempt of a broken task
fails at its reset.
"""

from __future__ import annotations

import random

import pytest

from headrace.trajectory import Failure
from headrace.wire import messages
from tests.orchestrator.scheduler.harness import BROKEN, FLAKY, Harness

SLOTS = 32
STEP_S = 0.02


def seconds_to_train(broken: list[bool], failure: Failure, episode_s: float = 0.5) -> float:
    """Simulated seconds until every good task of a list is trained on; ``broken`` says which tasks are not good."""
    harness = Harness(checked=False)
    tasks = [{"environment": "game:A", "seed": seed} for seed in range(len(broken))]
    harness.run(tasks=tasks, group_size=8, batch_size=32, max_staleness=1)
    begun, trained, running = harness.now, 0, []
    while trained < broken.count(False):
        assert harness.now < begun + 300, f"{trained} of {broken.count(False)} good groups in 300 s"
        ended = [attempt for ends_at, attempt in running if ends_at <= harness.now]
        running = [(ends_at, attempt) for ends_at, attempt in running if ends_at > harness.now]
        for attempt in ended:
            fails = broken[attempt.task.seed]
            harness.finish(attempt, "failed" if fails else "finished", **({"failure": failure} if fails else {}))
        while attempts := harness.lease(min(SLOTS - len(running), SLOTS // 4)):
            running += [(harness.now + (STEP_S if broken[a.task.seed] else episode_s), a) for a in attempts]
        batch = harness.pull()
        if not isinstance(batch, messages.EmptyReply):
            trained += len(batch.groups)
            harness.ack(batch)
        harness.advance(STEP_S)
    return harness.now - begun


@pytest.mark.parametrize("failure", [BROKEN, FLAKY], ids=["permanent", "retryable"])
def test_a_list_that_begins_with_broken_tasks_gets_to_the_good_ones_at_full_speed(failure: Failure):
    good = [False] * 16
    assert seconds_to_train([True] * 12 + good, failure) < seconds_to_train(good, failure) / 0.8


@pytest.mark.parametrize("failure", [BROKEN, FLAKY], ids=["permanent", "retryable"])
def test_good_tasks_of_a_half_broken_list_get_most_of_the_throughput_of_a_list_of_good_ones(failure: Failure):
    good = [False] * 32
    half = good + [True] * 32
    random.Random(13).shuffle(half)
    assert seconds_to_train(half, failure) < seconds_to_train(good, failure) / 0.8

"""Shares of slow and fast tasks, with the real scheduler on a virtual clock.

* The share of every kind of task in what is trained on equals its share in what was drawn, for any mix of durations.
* The learner steps at 90 % at least of the rate that the staleness bound allows.
* No group goes stale while the learner makes one version for each batch, also while servers load new weights.
* A task of a finite list is served unless it failed.
* No history of durations and failures ends in a deadlock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.selection.simulation import Simulation
from headrace.trajectory import Status
from headrace.wire import messages

STEP_S = 0.1
KINDS = {"e:fast": 3.0, "e:slow": 1.0}
MIXTURE = [{"id": name, "weight": weight, "tags": [name[2:]]} for name, weight in KINDS.items()]
GROUPS_OF_A_BATCH = 8


def spec(staleness: int, **fields: object) -> dict[str, object]:
    return {"environments": MIXTURE, "group_size": 2, "batch_size": 16, "max_staleness": staleness, **fields}


def takes(slow_s: float, fast_s: float = 0.02) -> Callable[[messages.Assignment], float]:
    return lambda attempt: slow_s if attempt.task.environment == "e:slow" else fast_s


def assert_shares_equal(simulation: Simulation) -> None:
    """Assert that the trained share of the slow kind is its drawn share, within two standard errors."""
    trained, drawn = (simulation.share("e:slow", counts) for counts in (simulation.trained, simulation.drawn))
    error = math.sqrt(0.25 * 0.75 / simulation.trained.total())
    assert abs(trained - drawn) < 2 * error, f"{trained:.3f} trained, {drawn:.3f} drawn"


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("slow_s", [0.3, 1.5])
@pytest.mark.parametrize("slots", [16, 64])
def test_slow_tasks_are_trained_on_as_often_as_they_are_drawn(staleness: int, slow_s: float, slots: int):
    simulation = Simulation(spec(staleness), takes(slow_s), step_s=STEP_S, slots=slots).run(versions=40)
    assert len(simulation.versions) == 40
    assert simulation.retired == {"acked": 40 * GROUPS_OF_A_BATCH}
    assert_shares_equal(simulation)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("slow_s", [0.3, 1.5])
def test_the_learner_steps_at_nine_tenths_of_the_rate_that_the_bound_allows(staleness: int, slow_s: float):
    simulation = Simulation(spec(staleness), takes(slow_s), step_s=STEP_S).run(versions=40)
    versions_of_a_slow_group = staleness + 1  # the version that it is trained into is one of them
    shortest_s = max(STEP_S, (slow_s + STEP_S) / versions_of_a_slow_group) * len(simulation.versions)
    assert simulation.seconds < shortest_s / 0.9


@pytest.mark.parametrize("staleness", [1, 3])
def test_nothing_goes_stale_while_servers_load_the_weights_of_each_version(staleness: int):
    simulation = Simulation(spec(staleness), takes(0.3), step_s=STEP_S, sync_s=0.05).run(versions=40)
    assert simulation.retired == {"acked": 40 * GROUPS_OF_A_BATCH}
    assert_shares_equal(simulation)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_learner_that_holds_batches_ahead_loses_no_slow_group(prefetch: int):
    simulation = Simulation(spec(3), takes(0.5), step_s=STEP_S, prefetch=prefetch).run(versions=40)
    assert simulation.retired == {"acked": 40 * GROUPS_OF_A_BATCH}
    assert_shares_equal(simulation)


@pytest.mark.parametrize("order", ["ready", "lifo", "uniform"])
def test_the_other_orders_do_not_wait_and_train_on_slow_tasks_too_rarely(order: str):
    simulation = Simulation(spec(1, selection={"order": order}), takes(1.5), step_s=STEP_S).run(versions=40)
    assert simulation.share("e:slow", simulation.trained) < 0.1
    assert simulation.seconds < 0.5 * 40 * (1.5 + STEP_S) / 2


@pytest.mark.parametrize("order", ["fifo", "ready"])
def test_every_task_of_a_finite_list_is_served_also_after_an_outage(order: str):
    tasks = [{"environment": "e:slow" if n % 4 == 0 else "e:fast", "seed": n} for n in range(100)]
    listed = {"tasks": tasks, "environments": [], "epochs": 2, "selection": {"order": order}}

    def duration_s(attempt: messages.Assignment) -> float:
        outage = 20 <= int(attempt.task.id) < 32
        return 5.0 if outage else takes(0.5)(attempt)

    simulation = Simulation(spec(1, **listed), duration_s, step_s=STEP_S).run(versions=1000)
    assert simulation.finished
    assert simulation.trained == {"e:slow": 50, "e:fast": 150}


def test_while_no_server_has_a_version_that_could_be_served_only_single_attempts_are_made():
    steps = {"environments": [{"id": "e:fast"}], "batch_size": 64, "max_staleness": 1}
    simulation = Simulation(steps, takes(0.0, 0.05), step_s=0.5, sync_s=None, slots=16).run(versions=99, limit_s=20)
    assert len(simulation.versions) == 2
    tries = 45  # at growing intervals
    assert simulation.retired["stale"] <= 16 + tries, "those that were leased when version 0.1 was acked, and the tries"
    assert simulation.waits[-1].reasons[0].code == "policy-outdated"


@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_mix_of_durations_and_failures_starves_a_kind_or_stops_the_learner(data: st.DataObject):
    seed, staleness = data.draw(st.integers(0, 999)), data.draw(st.sampled_from([0, 1, 3]))
    slots, batch = data.draw(st.sampled_from([3, 16, 64])), data.draw(st.sampled_from([2, 8, 16]))
    prefetch = data.draw(st.integers(0, staleness))
    sync_s = data.draw(st.sampled_from([0.0, 0.05, 0.5]))
    tail = data.draw(st.sampled_from([1.2, 2.5]))
    failing = data.draw(st.sampled_from([0.0, 0.2]))
    fields = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "short_groups": st.sampled_from(["serve", "drop"]),
                "zero_variance": st.sampled_from(["drop"]),
                "max_uses": st.just(2),
            },
        )
    )
    draw = random.Random(seed)

    def duration_s(attempt: messages.Assignment) -> float:
        return min(60.0, draw.paretovariate(tail) * (0.5 if attempt.task.environment == "e:slow" else 0.02))

    def status(attempt: messages.Assignment) -> Status:
        return "failed" if draw.random() < failing else "finished"

    simulation = Simulation(
        spec(staleness, batch_size=batch, retries={"quarantine_after": 10_000}, **fields),
        duration_s,
        step_s=STEP_S,
        slots=slots,
        prefetch=prefetch,
        sync_s=sync_s,
        status=status,
    ).run(versions=30, limit_s=100_000)
    assert len(simulation.versions) == 30, f"it stops: {simulation.waits[-1].reasons}"
    if "max_uses" not in fields:
        assert simulation.retired["stale"] == 0

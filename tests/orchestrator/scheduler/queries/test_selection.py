"""Selection of groups: orders, draws, filters."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from headrace.errors import InvalidRequest
from headrace.selection import SELECTION_RULES, SelectionRule
from headrace.wire import messages
from headrace_orchestrator.scheduler.state.eligible.filters import GroupFilter
from tests.orchestrator.scheduler.harness import Harness, ServedBatch
from tests.orchestrator.scheduler.scenarios import (
    MIXED_ENVIRONMENTS,
    chosen_batches,
    eligible_harness,
    kinds_of_batch,
    mixed_harness,
)


def test_fifo_serves_the_oldest_dispatch_first():
    harness = eligible_harness("fifo", batch_size=2)
    assert [harness.batch().groups for _ in range(3)] == [["g0", "g1"], ["g2", "g3"], ["g4", "g5"]]


def test_lifo_serves_the_newest_dispatch_first():
    harness = eligible_harness("lifo", batch_size=2)
    assert [harness.batch().groups for _ in range(3)] == [["g5", "g4"], ["g3", "g2"], ["g1", "g0"]]


@pytest.mark.parametrize("order", ["fifo", "lifo", "uniform", "prioritized"])
def test_a_batch_takes_whole_groups_up_to_its_budget_of_tokens(order):
    harness = eligible_harness(order, group_size=2, batch_size=1, batch_tokens=400)
    assert [len(harness.batch().groups) for _ in range(3)] == [2, 2, 2], "200 tokens each"


def chi_square(counts: Counter[tuple[str, ...]], expected: dict[tuple[str, ...], float]) -> float:
    times = sum(counts.values())
    assert counts.keys() <= expected.keys()
    return sum((counts[key] - times * share) ** 2 / (times * share) for key, share in expected.items())


def test_uniform_draws_every_ordered_pair_as_often():
    harness = eligible_harness("uniform", groups=4, batch_size=2)
    counts = Counter(chosen_batches(harness, 4800))
    pairs = dict.fromkeys(permutations(["g0", "g1", "g2", "g3"], 2), 1 / 12)
    assert chi_square(counts, pairs) < 31.3, "11 degrees of freedom: once in a thousand seeds"


def test_uniform_draws_as_evenly_from_groups_of_several_kinds_and_versions():
    harness = Harness()
    harness.run(source="learner", selection={"order": "uniform"}, batch_size=2, max_staleness=3)
    tasks = [{"environment": f"game:{number % 3}", "seed": number} for number in range(5)]
    groups = [messages.GroupRequest(id=f"g{number}", task=task) for number, task in enumerate(tasks)]
    harness.core.submit_groups("r", groups, harness.now)
    attempts = harness.lease(5)
    for attempt in attempts[:3]:
        harness.finish(attempt)
    harness.announce("0.1")
    for attempt in attempts[3:]:
        harness.finish(attempt)
    counts = Counter(chosen_batches(harness, 4000))
    pairs = dict.fromkeys(permutations([f"g{number}" for number in range(5)], 2), 1 / 20)
    assert chi_square(counts, pairs) < 43.9, "19 degrees of freedom: once in a thousand seeds"


def test_a_rule_of_a_third_party_that_draws_more_than_a_batch_takes_leaves_the_rest_eligible(monkeypatch):
    last_drawn_first = SelectionRule(lambda groups: reversed(list(groups.drawn())))
    monkeypatch.setitem(SELECTION_RULES, "last-drawn-first", last_drawn_first)
    harness = eligible_harness("last-drawn-first", batch_size=2)
    served = [group for _ in range(3) for group in harness.batch().groups]
    assert sorted(served) == ["g0", "g1", "g2", "g3", "g4", "g5"]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_prioritized_draws_in_proportion_to_the_power_of_the_priority_without_replacement(exponent):
    harness = eligible_harness("prioritized", groups=3, batch_size=2, selection={"exponent": exponent})
    priorities = {"g0": 1.0, "g1": 2.0, "g2": 4.0}
    harness.prioritize(priorities)
    weights = {id: priority**exponent for id, priority in priorities.items()}
    total = sum(weights.values())
    pairs = {
        (first, second): weights[first] / total * weights[second] / (total - weights[first])
        for first, second in permutations(weights, 2)
    }
    assert chi_square(Counter(chosen_batches(harness, 3000)), pairs) < 20.5, (
        "5 degrees of freedom: once in a thousand seeds"
    )


@pytest.mark.parametrize("order", ["uniform", "prioritized"])
def test_a_draw_depends_on_the_seed_the_batches_formed_and_the_eligible_groups_alone(order):
    harness, again, other = (
        eligible_harness(order, batch_size=2),
        eligible_harness(order, batch_size=2),
        eligible_harness(order, seed=1),
    )
    assert chosen_batches(harness, 50) == chosen_batches(again, 50)
    assert chosen_batches(harness, 50) != chosen_batches(other, 50)
    first = harness.batch()
    harness.core = harness.replayed()
    again.batch()
    assert harness.batch().groups == again.batch().groups != first.groups


def test_a_draw_is_the_same_in_whatever_order_the_groups_became_eligible():
    harness, again = eligible_harness("uniform", batch_size=2), eligible_harness("uniform", batch_size=2)
    for _ in range(5):
        batch = harness.batch()
        harness.core.dissolve("r", batch.id, "damaged", harness.now)
        harness.settle()
        assert chosen_batches(harness, 20) == chosen_batches(again, 20)


@pytest.mark.parametrize("order", ["fifo", "lifo", "uniform", "prioritized"])
def test_groups_are_used_as_often_as_the_run_says_with_every_order(order):
    harness = eligible_harness(order, batch_size=1, max_uses=3)
    uses: Counter[str] = Counter()
    for _ in range(18):
        batch = harness.batch()
        uses.update(batch.groups)
        harness.ack(batch)
    assert uses == Counter(dict.fromkeys([f"g{number}" for number in range(6)], 3))
    assert "no-tasks" in [reason.code for reason in harness.empty().reasons]


# Filters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fifo", "lifo", "uniform", "prioritized"])
@pytest.mark.parametrize(
    ("filters", "fitting"),
    [
        ({"environments": ["game:B"]}, {("game:B", "hard")}),
        ({"environments": ["game:A", "game:C"], "tags": ["hard"]}, {("game:A", "hard", "new")}),
        ({"tags": ["hard"]}, {("game:A", "hard", "new"), ("game:B", "hard")}),
        ({"tags": ["new", "hard"]}, {("game:A", "hard", "new")}),
    ],
)
def test_a_pull_may_ask_for_some_kinds_of_groups(order, filters, fitting):
    harness = mixed_harness(selection={"order": order})
    kinds = set()
    while isinstance(batch := harness.pull(**filters), ServedBatch):
        kinds |= kinds_of_batch(harness, batch)
    assert kinds == fitting
    assert harness.status().selected["filtered"] == harness.status().selected[order]


def test_pulls_that_ask_for_different_kinds_or_for_any_go_on_side_by_side():
    harness = mixed_harness()
    taken: Counter[str] = Counter()
    for _ in range(8):
        for filters in ({"environments": ["game:B"]}, {"tags": ["easy"]}, {}):
            batch = harness.pull(session="s", **filters)
            if isinstance(batch, ServedBatch):
                taken.update(batch.groups)
                harness.ack(batch)
                harness.work()
    assert set(taken.values()) == {1}
    assert len(taken) >= 40


def test_a_learner_that_pulls_one_kind_only_is_served_though_others_fill_the_credit():
    """Nothing goes stale and no other learner pulls: each pull that waits admits one more group."""
    harness = Harness()
    harness.run(environments=MIXED_ENVIRONMENTS, batch_size=2, max_staleness=0)
    for _ in range(8):
        rounds = 0
        while not isinstance(batch := harness.pull(environments=["game:B"]), ServedBatch):
            assert "filtered" in [reason.code for reason in batch.reasons] or rounds == 0
            harness.work()
            rounds += 1
            assert rounds < 40
        harness.ack(batch)


def test_the_answer_to_a_pull_whose_kind_is_not_ready_counts_what_is_ready():
    harness = mixed_harness()
    while isinstance(harness.pull(tags=["new"]), ServedBatch):
        pass
    reply = harness.empty(tags=["new"])
    reason = next(reason for reason in reply.reasons if reason.code == "filtered")
    fitting = harness.core.state.runs["r"].eligible.count(GroupFilter.of((), ["new"]))
    assert reason.facts == {"groups": harness.status().groups.eligible - fitting, "batches": 0}
    ready = f"{reason.facts['groups']} groups."
    assert reason.message == f"The groups that are ready do not fit this pull (tags ['new']): {ready}"
    assert not reply.finished


def test_a_filter_that_no_task_of_the_run_fits_is_refused():
    harness = mixed_harness()
    with pytest.raises(InvalidRequest, match=r"no task of environments \['game:A'\] and tags \['soft'\]"):
        harness.pull(environments=["game:A"], tags=["soft"])
    harness.submit("g")
    with pytest.raises(InvalidRequest, match="not both"):
        harness.pull(groups=["g"], tags=["hard"])


def test_submitted_tasks_carry_tags_too():
    harness = Harness()
    harness.run(source="learner", batch_size=1)
    groups = [
        messages.GroupRequest(id=tag, task={"environment": "game:A", "seed": 1, "tags": [tag]})
        for tag in ("hard", "easy")
    ]
    harness.core.submit_groups("r", groups, harness.now)
    harness.work()
    assert harness.batch(tags=["easy"]).groups == ["easy"]


def test_the_end_of_a_list_is_the_end_for_groups_that_fit():
    tasks = [{"environment": "game:A", "tags": ["odd" if seed % 2 else "even"], "seed": seed} for seed in range(5)]
    harness = Harness()
    harness.run(tasks=tasks, batch_size=2, max_staleness=9)
    harness.work()
    harness.ack(harness.batch(tags=["odd"]))
    reply = harness.empty(tags=["odd"])
    assert ([reason.code for reason in reply.reasons], reply.finished) == (["tasks-exhausted"], True)
    assert [len(harness.batch(tags=["even"]).groups) for _ in range(2)] == [2, 1]

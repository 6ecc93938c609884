"""The frozen adapters that play in a group."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRunSpec
from headrace.runspec import parse_run_spec
from headrace_orchestrator.scheduler import events

SERVER = "http://127.0.0.1:8000"
POOL = [{"name": name, "path": f"/adapters/{name}"} for name in ("a", "b", "c")]


def policy(routing, **more):
    agents = {"opponent": {"train": False, "adapters": ["a", "b", "c"], "routing": routing}}
    return {"endpoints": [SERVER], "adapters": POOL, "agents": agents, **more}


def played(harness):
    return [event.adapters["opponent"] for event in harness.events_of(events.GroupAdmitted)]


@pytest.mark.parametrize(("routing", "expected"), [("round_robin", list("abcab")), ("fixed", list("aaaaa"))])
def test_fixed_is_always_the_first_and_round_robin_the_next_one_for_each_group(harness, routing, expected):
    harness.run(group_size=2, batch_size=6, policy=policy(routing))
    assert played(harness)[:5] == expected


def test_all_members_of_a_group_have_the_same_adapters_topped_up_ones_too(harness):
    harness.run(group_size=3, batch_size=6, policy=policy("round_robin"))
    attempts = harness.lease(6)
    harness.finish(attempts[0], "failed")
    attempts += harness.lease(6)
    by_group = {}
    for attempt in attempts:
        by_group.setdefault(attempt.group, set()).add(attempt.adapters["opponent"])
    assert all(len(adapters) == 1 for adapters in by_group.values())
    assert len({*map(tuple, by_group.values())}) > 1


def test_rotation_continues_after_a_restart_and_counts_submitted_and_evaluated_groups(harness):
    harness.run(source="learner", policy=policy("round_robin"))
    harness.submit("one")
    harness.restart()
    harness.evaluate(1)
    harness.restart(harness.restored(harness.core.snapshot()))
    harness.submit("two", "three")
    assert played(harness) == list("abca")
    (evaluated, *others) = harness.lease(8, capabilities=[])
    assert {a.group: a.adapters for a in others} == {
        "one": {"opponent": "a"},
        "two": {"opponent": "c"},
        "three": {"opponent": "a"},
    }
    assert evaluated.adapters == {"opponent": "b"}


def test_a_group_names_the_adapter_that_is_trained(harness):
    harness.run(batch_size=1, policy={"endpoints": [SERVER], "adapter": "math"})
    assert harness.events_of(events.GroupAdmitted)[0].policy.adapter == "math"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adapters": [*POOL, POOL[0]]}, "have the same name"),
        ({"adapters": POOL, "adapter": "a"}, "have the same name"),
        ({"adapter": "a", "endpoints": []}, "policy.endpoints"),
        ({"agents": {"x": {"train": False, "adapters": ["z"]}}}, "not in policy.adapters"),
        ({"adapters": POOL, "agents": {"x": {"adapters": ["a"]}}}, "train = false"),
    ],
)
def test_impossible_adapters_are_refused_when_the_run_is_created(wrong, message):
    with pytest.raises(InvalidRunSpec, match=message):
        parse_run_spec({"name": "r", "policy": {"endpoints": [SERVER], **wrong}})

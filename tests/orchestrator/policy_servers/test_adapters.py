"""Adapters that the servers of a run should hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runspec import PolicySpec
from headrace.trajectory import Version
from headrace_orchestrator.policy_servers.adapters import Adapters

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


def adapters(frozen="", *, pinned="", trained=None, limit=None, servers=(ONE,)):
    spec = PolicySpec(
        endpoints=[ONE],
        adapter=trained,
        adapters=[{"name": name, "path": f"/{name}", "pinned": name in pinned} for name in frozen],
    )
    held = Adapters("run", spec, limit)
    held.take_servers(servers)
    for server in servers:
        held.take_list(server, {})
    return held


def plain(name):
    """The name in the run's spec."""
    assert name.startswith("run/")
    return name.removeprefix("run/")


def desired(held):
    return {plain(name): path for name, path in held.desired().items()}


def settle(held, now=0.0):
    """Carry out all calls with success; returns them in order."""
    calls_made = []
    while calls := held.step(now):
        for call in calls:
            calls_made.append(f"{call.kind} {plain(call.name)}")
            held.take_result(call, "", now)
    return calls_made


def test_pinned_and_used_adapters_are_always_held_and_others_by_their_last_use():
    held = adapters("abcd", pinned="d", limit=2)
    assert set(desired(held)) == {"d", "a"}, "in the order of the spec, before any use"
    held.use({"c"})
    assert set(desired(held)) == {"d", "c"}
    held.use({"b"})
    assert set(desired(held)) == {"d", "b"}
    held.use(set())
    assert set(desired(held)) == {"d", "b"}, "the most recently used one"
    held.use({"a", "b", "c"})
    assert set(desired(held)) == {"a", "b", "c", "d"}, "more adapters are in use than fit"
    assert "4 adapters are in use" in held.reasons()[0].message


def test_each_version_of_the_trained_adapter_has_its_own_name_and_the_two_newest_are_held():
    held = adapters(trained="math")
    for number in (1, 2, 3):
        held.announce(Version(0, number), f"/v{number}")
        settle(held)
    assert desired(held) == {"math@0.2": "/v2", "math@0.3": "/v3"}
    assert held.version(ONE) == Version(0, 3) == held.served


def test_a_new_version_is_loaded_before_an_old_one_is_unloaded():
    held = adapters(trained="math")
    done = []
    for number in (1, 2, 3):
        held.announce(Version(0, number), f"/v{number}")
        done.append(settle(held))
    assert done[1] == ["load math@0.2"]
    assert done[2] == ["load math@0.3", "unload math@0.1"]


def test_an_outdated_version_is_not_loaded_and_the_served_one_stays_while_newer_ones_fail():
    held = adapters(trained="math")
    held.announce(Version(0, 1), "/v1")
    settle(held)
    for number in (2, 3, 4):
        held.announce(Version(0, number), f"/v{number}")
        (call,) = held.step(0.0)
        assert plain(call.name) == f"math@0.{number}"
        held.take_result(call, "no", 0.0)
        held.announce(Version(0, 1), "/v1")
        assert set(desired(held)) == {"math@0.1", f"math@0.{number}"}
    assert held.version(ONE) == held.served == Version(0, 1)


def test_a_restarted_server_gets_its_adapters_again_and_adapters_of_other_owners_are_left_alone():
    held = adapters("a", trained="math")
    held.announce(Version(0, 1), "/v1")
    settle(held)
    held.take_list(ONE, {"other.math@0.9": "/x", "guest": "/y"})
    assert held.missing_reason(ONE)
    assert settle(held) == ["load math@0.1", "load a"]
    assert not held.missing_reason(ONE)


def test_an_adapter_of_the_run_from_another_folder_is_replaced():
    held = adapters("a")
    held.take_list(ONE, {"run/a": "/elsewhere"})
    assert settle(held) == ["unload a", "load a"]


def test_once_a_version_is_served_servers_without_it_get_no_requests():
    held = adapters(trained="math", servers=(ONE, TWO))
    assert (held.version(ONE), held.missing_reason(ONE), held.served) == (Version(0, 0), "", Version(0, 0))
    held.announce(Version(0, 1), "/v1")
    assert held.missing_reason(ONE) == held.missing_reason(TWO) == ""
    one, two = held.step(0.0)
    held.take_result(one, "", 0.0)
    held.take_result(two, "the rank is 16", 0.0)
    assert held.missing_reason(ONE) == ""
    assert "the rank is 16" in held.missing_reason(TWO)
    assert TWO in held.reasons()[0].message


def test_a_refused_load_is_retried_with_growing_delays_and_a_new_version_is_loaded_at_once():
    held = adapters(trained="math")
    held.announce(Version(0, 1), "/v1")
    now, waits = 0.0, []
    for _ in range(4):
        (call,) = held.step(now)
        held.take_result(call, "no", now)
        waits.append(held.due() - now)
        assert held.step(held.due() - 0.01) == []
        now = held.due()
    assert waits == [1, 2, 4, 8]
    (call,) = held.step(now)
    held.take_result(call, "no", now)
    held.announce(Version(0, 2), "/v2")
    assert held.step(now)


def test_a_server_whose_adapters_are_unknown_gets_no_calls():
    held = adapters("a")
    held.take_list(ONE, None)
    assert held.step(0.0) == []
    assert held.missing_reason(ONE) == "", "no group uses it yet"


NAMES = "abcdef"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    pinned=st.sets(st.sampled_from(NAMES), max_size=3),
    limit=st.integers(1, 6) | st.none(),
    steps=st.lists(st.sets(st.sampled_from(NAMES), max_size=3) | st.integers(1, 9), max_size=20),
)
def test_pinned_adapters_stay_the_limit_holds_and_the_least_recently_used_one_is_unloaded(pinned, limit, steps):
    held = adapters(NAMES, pinned="".join(pinned), trained="math", limit=limit)
    settle(held)
    used, number = {name: -index for index, name in enumerate(NAMES)}, 0
    in_use: set[str] = set()
    for time, step in enumerate(steps, 1):
        if isinstance(step, int):
            number += step
            held.announce(Version(0, number), f"/v{number}")
        else:
            used |= dict.fromkeys(step - in_use, time)
            held.use(step)
            in_use = step
        done = settle(held)
        kept = set(desired(held))
        assert not {f"unload {name}" for name in pinned | in_use} & set(done)
        trained = {name for name in kept if "@" in name}
        assert len(trained) <= 2
        always = pinned | in_use | trained
        assert always <= kept
        assert limit is None or len(kept) <= max(limit, len(always))
        others, gone = kept - always, set(NAMES) - kept
        assert not (others and gone) or min(used[name] for name in others) >= max(used[name] for name in gone)
        assert not held.missing_reason(ONE)

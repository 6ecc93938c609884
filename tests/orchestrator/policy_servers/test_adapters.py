"""Adapters that the servers of a run should hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runspec import PolicySpec
from headrace.trajectory import Version
from headrace_orchestrator.policy_servers.adapters import Adapters
from headrace_orchestrator.policy_servers.server_state import CallProblem

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


def make_adapters(frozen="", *, pinned="", trained=None, limit=None, servers=(ONE,)):
    spec = PolicySpec(
        endpoints=[ONE],
        adapter=trained,
        adapters=[{"name": name, "path": f"/{name}", "pinned": name in pinned} for name in frozen],
    )
    adapters = Adapters("run", spec, limit)
    adapters.take_servers(servers)
    for server in servers:
        adapters.take_list(server, {})
    return adapters


def plain(name):
    """The name in the run's spec."""
    assert name.startswith("run/")
    return name.removeprefix("run/")


def desired(adapters):
    return {plain(name): path for name, path in adapters.desired().items()}


def settle(adapters, now=0.0):
    """Carry out all calls with success; returns them in order."""
    calls_made = []
    while calls := adapters.step(now):
        for call in calls:
            calls_made.append(f"{call.kind} {plain(call.name)}")
            adapters.take_result(call, None, now)
    return calls_made


def test_pinned_and_used_adapters_are_always_held_and_others_by_their_last_use():
    adapters = make_adapters("abcd", pinned="d", limit=2)
    assert set(desired(adapters)) == {"d", "a"}, "in the order of the spec, before any use"
    adapters.use({"c"})
    assert set(desired(adapters)) == {"d", "c"}
    adapters.use({"b"})
    assert set(desired(adapters)) == {"d", "b"}
    adapters.use(set())
    assert set(desired(adapters)) == {"d", "b"}, "the most recently used one"
    adapters.use({"a", "b", "c"})
    assert set(desired(adapters)) == {"a", "b", "c", "d"}, "more adapters are in use than fit"
    assert "4 adapters are in use" in adapters.reasons()[0].message


def test_each_version_of_the_trained_adapter_has_its_own_name_and_the_two_newest_are_held():
    adapters = make_adapters(trained="math")
    for number in (1, 2, 3):
        adapters.announce(Version(0, number), f"/v{number}")
        settle(adapters)
    assert desired(adapters) == {"math@0.2": "/v2", "math@0.3": "/v3"}
    assert adapters.version(ONE) == Version(0, 3) == adapters.served


def test_a_new_version_is_loaded_before_an_old_one_is_unloaded():
    adapters = make_adapters(trained="math")
    done = []
    for number in (1, 2, 3):
        adapters.announce(Version(0, number), f"/v{number}")
        done.append(settle(adapters))
    assert done[1] == ["load math@0.2"]
    assert done[2] == ["load math@0.3", "unload math@0.1"]


def test_an_outdated_version_is_not_loaded_and_the_served_one_stays_while_newer_ones_fail():
    adapters = make_adapters(trained="math")
    adapters.announce(Version(0, 1), "/v1")
    settle(adapters)
    for number in (2, 3, 4):
        adapters.announce(Version(0, number), f"/v{number}")
        (call,) = adapters.step(0.0)
        assert plain(call.name) == f"math@0.{number}"
        adapters.take_result(call, CallProblem("adapter-refused", "no"), 0.0)
        adapters.announce(Version(0, 1), "/v1")
        assert set(desired(adapters)) == {"math@0.1", f"math@0.{number}"}
    assert adapters.version(ONE) == adapters.served == Version(0, 1)


def test_a_restarted_server_gets_its_adapters_again_and_adapters_of_other_owners_are_left_alone():
    adapters = make_adapters("a", trained="math")
    adapters.announce(Version(0, 1), "/v1")
    settle(adapters)
    adapters.take_list(ONE, {"other.math@0.9": "/x", "guest": "/y"})
    assert adapters.missing_reason(ONE)
    assert settle(adapters) == ["load math@0.1", "load a"]
    assert not adapters.missing_reason(ONE)


def test_an_adapter_of_the_run_from_another_folder_is_replaced():
    adapters = make_adapters("a")
    adapters.take_list(ONE, {"run/a": "/elsewhere"})
    assert settle(adapters) == ["unload a", "load a"]


def test_a_list_counts_only_if_no_call_was_open_while_it_was_requested():
    adapters = make_adapters(trained="math")
    before = adapters.calls_before_list(ONE)
    adapters.announce(Version(0, 1), "/v1")
    (call,) = adapters.step(0.0)
    assert adapters.calls_before_list(ONE) is None
    adapters.take_result(call, CallProblem("weights-changed", "no"), 0.0)
    assert adapters.calls_before_list(ONE) not in (None, before)


def test_once_a_version_is_served_servers_without_it_get_no_requests():
    adapters = make_adapters(trained="math", servers=(ONE, TWO))
    assert (adapters.version(ONE), adapters.missing_reason(ONE), adapters.served) == (Version(0, 0), "", Version(0, 0))
    adapters.announce(Version(0, 1), "/v1")
    assert adapters.missing_reason(ONE) == adapters.missing_reason(TWO) == ""
    one, two = adapters.step(0.0)
    adapters.take_result(one, None, 0.0)
    adapters.take_result(two, CallProblem("adapter-refused", "the rank is 16"), 0.0)
    assert adapters.missing_reason(ONE) == ""
    assert "the rank is 16" in adapters.missing_reason(TWO)
    assert TWO in adapters.reasons()[0].message


def test_a_refused_load_is_retried_with_growing_delays_and_a_new_version_is_loaded_at_once():
    adapters = make_adapters(trained="math")
    adapters.announce(Version(0, 1), "/v1")
    now, waits = 0.0, []
    for _ in range(4):
        (call,) = adapters.step(now)
        adapters.take_result(call, CallProblem("adapter-refused", "no"), now)
        waits.append(adapters.due() - now)
        assert adapters.step(adapters.due() - 0.01) == []
        now = adapters.due()
    assert waits == [1, 2, 4, 8]
    (call,) = adapters.step(now)
    adapters.take_result(call, CallProblem("adapter-refused", "no"), now)
    adapters.announce(Version(0, 2), "/v2")
    assert adapters.step(now)


def test_a_server_whose_adapters_are_unknown_gets_no_calls():
    adapters = make_adapters("a")
    adapters.take_list(ONE, None)
    assert adapters.step(0.0) == []
    assert adapters.missing_reason(ONE) == "", "no group uses it yet"


NAMES = "abcdef"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    pinned=st.sets(st.sampled_from(NAMES), max_size=3),
    limit=st.integers(1, 6) | st.none(),
    steps=st.lists(st.sets(st.sampled_from(NAMES), max_size=3) | st.integers(1, 9), max_size=20),
)
def test_pinned_adapters_stay_the_limit_holds_and_the_least_recently_used_one_is_unloaded(pinned, limit, steps):
    adapters = make_adapters(NAMES, pinned="".join(pinned), trained="math", limit=limit)
    settle(adapters)
    used, number = {name: -index for index, name in enumerate(NAMES)}, 0
    in_use: set[str] = set()
    for time, step in enumerate(steps, 1):
        if isinstance(step, int):
            number += step
            adapters.announce(Version(0, number), f"/v{number}")
        else:
            used |= dict.fromkeys(step - in_use, time)
            adapters.use(step)
            in_use = step
        done = settle(adapters)
        kept = set(desired(adapters))
        assert not {f"unload {name}" for name in pinned | in_use} & set(done)
        trained = {name for name in kept if "@" in name}
        assert len(trained) <= 2
        always = pinned | in_use | trained
        assert always <= kept
        assert limit is None or len(kept) <= max(limit, len(always))
        others, gone = kept - always, set(NAMES) - kept
        assert not (others and gone) or min(used[name] for name in others) >= max(used[name] for name in gone)
        assert not adapters.missing_reason(ONE)

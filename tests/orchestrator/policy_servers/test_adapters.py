"""Which adapters the servers of a run are to hold."""

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
    found = Adapters("run", spec, limit)
    found.take_servers(servers)
    for server in servers:
        found.listed(server, {})
    return found


def plain(name):
    """As the run knows it."""
    assert name.startswith("run/")
    return name.removeprefix("run/")


def keep(found):
    return {plain(name): path for name, path in found.keep().items()}


def settle(found, now=0.0):
    """Carry out all that is wanted, well; returns it in order."""
    done = []
    while calls := found.step(now):
        for call in calls:
            done.append(f"{call.kind} {plain(call.name)}")
            found.answered(call, "", now)
    return done


def test_pinned_ones_and_those_in_use_are_always_held_and_the_rest_by_their_last_use():
    found = adapters("abcd", pinned="d", limit=2)
    assert set(keep(found)) == {"d", "a"}, "in the order of the spec, before any use"
    found.use({"c"})
    assert set(keep(found)) == {"d", "c"}
    found.use({"b"})
    assert set(keep(found)) == {"d", "b"}
    found.use(set())
    assert set(keep(found)) == {"d", "b"}, "the last that was used"
    found.use({"a", "b", "c"})
    assert set(keep(found)) == {"a", "b", "c", "d"}, "what is in use is more than fits"
    assert "4 adapters are in use" in found.reasons()[0].message


def test_each_version_of_the_trained_adapter_has_a_name_of_its_own_and_the_two_newest_are_held():
    found = adapters(trained="math")
    for number in (1, 2, 3):
        found.announced(Version(0, number), f"/v{number}")
        settle(found)
    assert keep(found) == {"math@0.2": "/v2", "math@0.3": "/v3"}
    assert found.version(ONE) == Version(0, 3) == found.served


def test_a_new_version_is_loaded_beside_the_old_one_which_goes_afterwards():
    found = adapters(trained="math")
    done = []
    for number in (1, 2, 3):
        found.announced(Version(0, number), f"/v{number}")
        done.append(settle(found))
    assert done[1] == ["load math@0.2"]
    assert done[2] == ["load math@0.3", "unload math@0.1"]


def test_a_version_that_was_overtaken_is_not_loaded_and_the_served_one_stays_while_newer_ones_fail():
    found = adapters(trained="math")
    found.announced(Version(0, 1), "/v1")
    settle(found)
    for number in (2, 3, 4):
        found.announced(Version(0, number), f"/v{number}")
        (call,) = found.step(0.0)
        assert plain(call.name) == f"math@0.{number}"
        found.answered(call, "no", 0.0)
        found.announced(Version(0, 1), "/v1")
        assert set(keep(found)) == {"math@0.1", f"math@0.{number}"}
    assert found.version(ONE) == found.served == Version(0, 1)


def test_a_server_that_was_started_again_is_given_what_it_lost_and_foreign_adapters_are_left_alone():
    found = adapters("a", trained="math")
    found.announced(Version(0, 1), "/v1")
    settle(found)
    found.listed(ONE, {"other.math@0.9": "/x", "guest": "/y"})
    assert found.lacks(ONE)
    assert settle(found) == ["load math@0.1", "load a"]
    assert not found.lacks(ONE)


def test_an_adapter_of_our_name_from_another_folder_is_replaced():
    found = adapters("a")
    found.listed(ONE, {"run/a": "/elsewhere"})
    assert settle(found) == ["unload a", "load a"]


def test_a_server_behind_the_newest_version_is_not_to_be_asked_and_one_at_0_0_is_if_none_has_more():
    found = adapters(trained="math", servers=(ONE, TWO))
    assert (found.version(ONE), found.lacks(ONE), found.served) == (Version(0, 0), "", Version(0, 0))
    found.announced(Version(0, 1), "/v1")
    assert found.lacks(ONE) == found.lacks(TWO) == ""
    one, two = found.step(0.0)
    found.answered(one, "", 0.0)
    found.answered(two, "the rank is 16", 0.0)
    assert found.lacks(ONE) == ""
    assert "the rank is 16" in found.lacks(TWO)
    assert TWO in found.reasons()[0].message


def test_what_is_refused_is_tried_again_later_each_time_and_at_once_when_there_is_another_version():
    found = adapters(trained="math")
    found.announced(Version(0, 1), "/v1")
    now, waits = 0.0, []
    for _ in range(4):
        (call,) = found.step(now)
        found.answered(call, "no", now)
        waits.append(found.due() - now)
        assert found.step(found.due() - 0.01) == []
        now = found.due()
    assert waits == [1, 2, 4, 8]
    (call,) = found.step(now)
    found.answered(call, "no", now)
    found.announced(Version(0, 2), "/v2")
    assert found.step(now)


def test_a_server_that_did_not_say_what_it_has_is_told_nothing():
    found = adapters("a")
    found.listed(ONE, None)
    assert found.step(0.0) == []
    assert found.lacks(ONE) == "", "nobody plays with it yet"


NAMES = "abcdef"


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    pinned=st.sets(st.sampled_from(NAMES), max_size=3),
    limit=st.integers(1, 6) | st.none(),
    steps=st.lists(st.sets(st.sampled_from(NAMES), max_size=3) | st.integers(1, 9), max_size=20),
)
def test_pins_are_never_evicted_the_limit_is_kept_and_what_goes_is_what_was_used_longest_ago(pinned, limit, steps):
    found = adapters(NAMES, pinned="".join(pinned), trained="math", limit=limit)
    settle(found)
    used, number = {name: -index for index, name in enumerate(NAMES)}, 0
    in_use: set[str] = set()
    for time, step in enumerate(steps, 1):
        if isinstance(step, int):
            number += step
            found.announced(Version(0, number), f"/v{number}")
        else:
            used |= dict.fromkeys(step - in_use, time)
            found.use(step)
            in_use = step
        done = settle(found)
        kept = set(keep(found))
        assert not {f"unload {name}" for name in pinned | in_use} & set(done)
        trained = {name for name in kept if "@" in name}
        assert len(trained) <= 2
        always = pinned | in_use | trained
        assert always <= kept
        assert limit is None or len(kept) <= max(limit, len(always))
        others, gone = kept - always, set(NAMES) - kept
        assert not (others and gone) or min(used[name] for name in others) >= max(used[name] for name in gone)
        assert not found.lacks(ONE)

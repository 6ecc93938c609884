"""The controller of policy servers, in a simulation where every call may fail at any moment."""

from __future__ import annotations

import pytest

from headrace.runspec import SyncSpec
from headrace.trajectory import Version
from headrace_orchestrator.policy_servers.controller import SyncFailed
from tests.orchestrator.policy_servers.simulation import World

A, B, C = "http://a:1", "http://b:1", "http://c:1"
LEASE_S = 5.0

MOVES = ["announce", "announce", "crash", "die", "down", "up", "drain", "hold", "pass", "pass", "pass", "pass"]


def play(made: World, moves: int) -> int:
    """Make random moves; returns the number of the last announced version."""
    draw, n = made.random, 1
    made.announce(n)
    for _ in range(moves):
        move, address = draw.choice(MOVES), draw.choice([A, B, C])
        if move == "announce":
            n += 1
            made.announce(n, bad=draw.random() < 0.3)
        elif move == "crash":
            made.crash()
        elif move == "die":
            made.die(address)
        elif move in ("down", "up"):
            made.engines[address].up = move == "up"
        elif move == "drain":
            made.listed[address] = not made.listed[address]
        elif move == "hold":
            made.target = made.target._replace(hold=("e1", draw.choice([0.0, 20.0])))
        else:
            made.pass_time(draw.choice([0.1, 0.5, 3.0, 8.0]))
    return n


def world(order: str = "together", *, servers: int = 2) -> World:
    made = World([A, B, C][:servers], SyncSpec(order=order, pause_lease_s=LEASE_S))
    made.pass_time(2.0)
    return made


def states(made: World) -> dict[str, tuple[str, str]]:
    return {server.address: (server.state, server.version) for server in made.controller.statuses(made.now)}


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_no_server_ever_samples_under_a_wrong_name_and_all_get_the_newest_version(order):
    for seed in range(15):
        made = World([A, B, C], SyncSpec(order=order, pause_lease_s=LEASE_S), seed)
        made.faulty = (0.0, 0.2, 0.5)[seed % 3]
        check_settles(made, play(made, 30))


def check_settles(made: World, n: int) -> None:
    """Check that all servers load the next version once no call fails any more."""
    made.faulty = 0.0
    made.listed = dict.fromkeys(made.listed, False)
    made.target = made.target._replace(hold=("", 0.0))
    for engine in made.engines.values():
        engine.up = True
    made.announce(n + 1)
    made.pass_time(150.0)  # a check of files may take a minute
    assert states(made) == dict.fromkeys([A, B, C], ("serving", f"0.{n + 1}"))
    assert all(engine.paused_at is None for engine in made.engines.values())


def test_all_servers_get_a_new_version_together_and_the_pause_is_short():
    made = world()
    made.announce(1)
    made.pass_time(2.0)
    assert states(made) == {A: ("serving", "0.1"), B: ("serving", "0.1")}
    assert made.longest_pause_s < 1.5
    kinds = [call.kind for call in made.calls if call.address == A]
    at = kinds.index("check")
    assert kinds[at : at + 5] == ["check", "pause", "load", "probe", "resume"]


def test_rolling_pauses_one_server_at_a_time_while_the_others_serve():
    made = world("rolling", servers=3)
    made.announce(1)
    for _ in range(400):
        made.pass_time(0.01)
        paused = [engine for engine in made.engines.values() if engine.paused_at is not None]
        assert len(paused) <= 1
        assert sum(state == "serving" for state, _ in states(made).values()) >= 2
    assert states(made) == dict.fromkeys([A, B, C], ("serving", "0.1"))


def test_refused_weights_cause_no_pause_and_servers_continue_with_their_old_weights():
    made = world()
    made.announce(1, bad=True)
    made.pass_time(10.0)
    assert states(made) == {A: ("serving", "0.0"), B: ("serving", "0.0")}
    assert {call.kind for call in made.calls} == {"probe", "check"}
    (reason,) = made.controller.reasons()
    assert reason.code == "weight-sync"
    assert "weight sync of version 0.1 failed" in reason.message
    assert "cut short" in reason.message
    made.announce(2)
    made.pass_time(2.0)
    assert states(made) == {A: ("serving", "0.2"), B: ("serving", "0.2")}
    assert made.controller.reasons() == []


def test_a_server_with_unknown_weights_is_ejected_and_stays_paused_and_its_requests_are_ended():
    made = world()
    made.faults[B] = ["", "", "half", "", "", "half"]
    made.announce(1)
    made.pass_time(1.0)
    assert states(made)[A] == ("serving", "0.1")
    assert states(made)[B][0] == "ejected"
    assert made.engines[B].requests_ended
    made.pass_time(20.0)
    assert states(made) == {A: ("serving", "0.1"), B: ("serving", "0.1")}


def test_a_server_takes_requests_again_only_after_it_has_confirmed_its_version():
    made = world(servers=1)
    made.faults[A] = ["", "", "silent"]
    made.announce(1)
    made.pass_time(0.9)
    failed = [event.problem.kind for event in made.events if isinstance(event, SyncFailed)]
    assert failed == ["not-confirmed"]
    made.pass_time(5.0)
    assert states(made)[A] == ("serving", "0.1")


def test_a_server_that_kept_its_old_weights_is_ejected_once_others_serve_a_newer_version():
    made = world()
    made.faults[B] = ["", "", "never"]
    made.announce(1)
    made.pass_time(LEASE_S - 0.5)
    assert (states(made)[A], states(made)[B][0]) == (("serving", "0.1"), "syncing")
    made.pass_time(1.6)
    # It confirms its old weights: it resumes, and stays ejected until it has caught up.
    assert (states(made)[B], made.engines[B].paused_at) == (("ejected", "0.0"), None)
    made.pass_time(10.0)
    assert states(made)[B] == ("serving", "0.1")


def test_a_server_that_was_paused_for_long_gets_a_full_lease_for_its_next_load():
    made = world()
    made.faults[B] = ["", "", "half"]
    made.announce(1)
    made.pass_time(0.5)
    made.engines[B].up = False
    made.pass_time(1.0)
    made.engines[B].up = True
    made.faults[B] = ["", "", "half", "", "", "half", "", "", "half", "", "", "half"]
    made.pass_time(60.0)
    assert states(made)[B] == ("serving", "0.1")


def test_a_server_that_was_paused_before_its_load_continues_with_its_old_weights_after_a_crash():
    made = world()
    made.announce(1)
    while all(engine.paused_at is None for engine in made.engines.values()):
        made.pass_time(0.01)
    made.pending.clear()
    made.crash()
    made.pass_time(3.0)
    assert states(made) == {A: ("serving", "0.1"), B: ("serving", "0.1")}
    assert made.longest_pause_s < LEASE_S


def test_a_server_whose_load_was_interrupted_by_a_crash_is_loaded_again_before_it_resumes():
    made = world()
    made.announce(1)
    engine = made.engines[B]
    engine.name, engine.holds, engine.paused_at = "0.0 -> 0.1", "mixed", made.now
    made.crash()
    begun = len(made.calls)
    made.pass_time(3.0)
    assert states(made)[B] == ("serving", "0.1")
    calls = [call.kind for call in made.calls[begun:] if call.address == B and call.kind != "probe"]
    assert calls == ["check", "pause", "load", "resume"]


def test_no_server_is_paused_while_an_evaluation_holds_the_served_version_and_the_reason_names_it():
    made = world()
    made.announce(1)
    made.target = made.target._replace(hold=("e1", 12.0))
    made.pass_time(5.0)
    assert {call.kind for call in made.calls} == {"probe", "check"}
    (reason,) = made.controller.reasons()
    assert "evaluation e1 holds version 0.0 for up to 12 s" in reason.message
    made.announce(2)
    made.target = made.target._replace(hold=("", 0.0))
    made.pass_time(3.0)
    assert states(made) == {A: ("serving", "0.2"), B: ("serving", "0.2")}
    assert not any(call.version == Version(0, 1) for call in made.calls if call.kind == "load")


def test_a_restarted_server_takes_no_requests_before_it_has_caught_up():
    made = world()
    made.announce(1)
    made.pass_time(3.0)
    made.die(B)
    observed = set()
    for _ in range(300):
        made.pass_time(0.01)
        observed.add(states(made)[B])
    assert ("serving", "0.0") not in observed
    assert states(made)[B] == ("serving", "0.1")


def test_no_request_waits_in_a_paused_server_for_longer_than_the_pause_lease_whoever_paused_it():
    made = world()
    made.engines[A].paused_at = made.now
    made.pass_time(LEASE_S - 1)
    assert states(made)[A][0] == "syncing"
    made.pass_time(3.0)
    assert (states(made)[A], made.engines[A].paused_at) == (("serving", "0.0"), None)


def test_weights_for_a_run_without_servers_are_a_reason_with_advice():
    made = World([], SyncSpec())
    made.announce(1)
    made.pass_time(1.0)
    (reason,) = made.controller.reasons()
    assert "policy.endpoints" in reason.message


def test_a_draining_server_gets_no_new_weights_and_a_removed_server_is_not_left_paused():
    made = world()
    made.listed[B] = True
    made.announce(1)
    while made.engines[A].paused_at is None:
        made.pass_time(0.01)
    del made.listed[A]
    made.pass_time(3.0)
    assert (states(made)[B], made.engines[A].paused_at) == (("draining", "0.0"), None)

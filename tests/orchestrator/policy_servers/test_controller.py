"""The controller of policy servers, in a simulation where every call may fail at any moment."""

from __future__ import annotations

import pytest

from headrace.runspec import SyncSpec
from headrace.trajectory import Version
from headrace_orchestrator.policy_servers.controller import CHECK_TIMEOUT_S, PROBE_EVERY_S, Controller, SyncFailed
from headrace_orchestrator.policy_servers.server_state import ProbeResult
from tests.orchestrator.policy_servers.simulation import World

A, B, C = "http://a:1", "http://b:1", "http://c:1"
LEASE_S = 5.0

MOVES = ["announce", "announce", "crash", "die", "down", "up", "drain", "hold", "pass", "pass", "pass", "pass"]


def play(world: World, moves: int) -> int:
    """Make random moves; returns the number of the last announced version."""
    draw, n = world.random, 1
    world.announce(n)
    for _ in range(moves):
        move, address = draw.choice(MOVES), draw.choice([A, B, C])
        if move == "announce":
            n += 1
            world.announce(n, bad=draw.random() < 0.3)
        elif move == "crash":
            world.crash()
        elif move == "die":
            world.die(address)
        elif move in ("down", "up"):
            world.engines[address].up = move == "up"
        elif move == "drain":
            world.listed[address] = not world.listed[address]
        elif move == "hold":
            world.target = world.target._replace(hold=("e1", draw.choice([0.0, 20.0])))
        else:
            world.pass_time(draw.choice([0.1, 0.5, 3.0, 8.0]))
    return n


def new_world(order: str = "together", *, servers: int = 2) -> World:
    world = World([A, B, C][:servers], SyncSpec(order=order, pause_lease_s=LEASE_S))
    world.pass_time(2.0)
    return world


def states(world: World) -> dict[str, tuple[str, str]]:
    return {server.address: (server.state, server.version) for server in world.controller.statuses(world.now)}


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_no_server_ever_samples_under_a_wrong_name_and_all_get_the_newest_version(order):
    for seed in range(15):
        world = World([A, B, C], SyncSpec(order=order, pause_lease_s=LEASE_S), seed)
        world.faulty = (0.0, 0.2, 0.5)[seed % 3]
        check_settles(world, play(world, 30))


def check_settles(world: World, n: int) -> None:
    """Check that all servers load the next version once no call fails any more."""
    world.faulty = 0.0
    world.listed = dict.fromkeys(world.listed, False)
    world.target = world.target._replace(hold=("", 0.0))
    for engine in world.engines.values():
        engine.up = True
    world.announce(n + 1)
    world.pass_time(CHECK_TIMEOUT_S + 90.0)  # a lost check is given up after its deadline
    assert states(world) == dict.fromkeys([A, B, C], ("serving", f"0.{n + 1}"))
    assert all(engine.paused_at is None for engine in world.engines.values())


def test_each_server_is_probed_periodically_and_has_at_most_one_pending_call():
    controller = Controller(SyncSpec())
    controller.take_servers({A: False})
    assert [call.kind for call in controller.step(0.0)] == ["probe"]
    assert controller.step(100.0) == []
    controller.take_probe(A, ProbeResult(weights="0.0"), 100.0)
    assert controller.step(100.0 + PROBE_EVERY_S / 2) == []
    assert [call.kind for call in controller.step(100.0 + PROBE_EVERY_S)] == ["probe"]


def test_only_the_newest_version_is_loaded():
    world = new_world()
    world.announce(1)
    world.announce(2)
    world.pass_time(2.0)
    assert {call.version for call in world.calls if call.kind == "load"} == {Version(0, 2)}


def test_all_servers_get_a_new_version_together_and_the_pause_is_short():
    world = new_world()
    world.announce(1)
    world.pass_time(2.0)
    assert states(world) == {A: ("serving", "0.1"), B: ("serving", "0.1")}
    assert world.longest_pause_s < 1.5
    kinds = [call.kind for call in world.calls if call.address == A]
    at = kinds.index("check")
    assert kinds[at : at + 5] == ["check", "pause", "load", "probe", "resume"]


def test_rolling_pauses_one_server_at_a_time_while_the_others_serve():
    world = new_world("rolling", servers=3)
    world.announce(1)
    for _ in range(400):
        world.pass_time(0.01)
        paused = [engine for engine in world.engines.values() if engine.paused_at is not None]
        assert len(paused) <= 1
        assert sum(state == "serving" for state, _ in states(world).values()) >= 2
    assert states(world) == dict.fromkeys([A, B, C], ("serving", "0.1"))


def test_refused_weights_cause_no_pause_and_servers_continue_with_their_old_weights():
    world = new_world()
    world.announce(1, bad=True)
    world.pass_time(10.0)
    assert states(world) == {A: ("serving", "0.0"), B: ("serving", "0.0")}
    assert {call.kind for call in world.calls} == {"probe", "check"}
    (reason,) = world.controller.reasons()
    assert reason.code == "weight-sync"
    assert "weight sync of version 0.1 failed" in reason.message
    assert "cut short" in reason.message
    world.announce(2)
    world.pass_time(2.0)
    assert states(world) == {A: ("serving", "0.2"), B: ("serving", "0.2")}
    assert world.controller.reasons() == []


def test_a_server_with_unknown_weights_is_ejected_and_stays_paused_and_its_requests_are_ended():
    world = new_world()
    world.faults[B] = ["", "", "half", "", "", "half"]
    world.announce(1)
    world.pass_time(1.0)
    assert states(world)[A] == ("serving", "0.1")
    assert states(world)[B][0] == "ejected"
    assert world.engines[B].requests_ended
    world.pass_time(20.0)
    assert states(world) == {A: ("serving", "0.1"), B: ("serving", "0.1")}


def test_a_server_takes_requests_again_only_after_it_has_confirmed_its_version():
    world = new_world(servers=1)
    world.faults[A] = ["", "", "silent"]
    world.announce(1)
    world.pass_time(0.9)
    failed = [event.problem.kind for event in world.events if isinstance(event, SyncFailed)]
    assert failed == ["not-confirmed"]
    world.pass_time(5.0)
    assert states(world)[A] == ("serving", "0.1")


def test_a_server_that_kept_its_old_weights_is_ejected_once_others_serve_a_newer_version():
    world = new_world()
    world.faults[B] = ["", "", "never"]
    world.announce(1)
    world.pass_time(LEASE_S - 0.5)
    assert (states(world)[A], states(world)[B][0]) == (("serving", "0.1"), "syncing")
    world.pass_time(1.6)
    # It confirms its old weights: it resumes, and stays ejected until it has caught up.
    assert (states(world)[B], world.engines[B].paused_at) == (("ejected", "0.0"), None)
    world.pass_time(10.0)
    assert states(world)[B] == ("serving", "0.1")


def test_a_server_that_was_paused_for_long_gets_a_full_lease_for_its_next_load():
    world = new_world()
    world.faults[B] = ["", "", "half"]
    world.announce(1)
    world.pass_time(0.5)
    world.engines[B].up = False
    world.pass_time(1.0)
    world.engines[B].up = True
    world.faults[B] = ["", "", "half", "", "", "half", "", "", "half", "", "", "half"]
    world.pass_time(60.0)
    assert states(world)[B] == ("serving", "0.1")


def test_a_server_that_was_paused_before_its_load_continues_with_its_old_weights_after_a_crash():
    world = new_world()
    world.announce(1)
    while all(engine.paused_at is None for engine in world.engines.values()):
        world.pass_time(0.01)
    world.pending.clear()
    world.crash()
    world.pass_time(3.0)
    assert states(world) == {A: ("serving", "0.1"), B: ("serving", "0.1")}
    assert world.longest_pause_s < LEASE_S


def test_a_server_whose_load_was_interrupted_by_a_crash_is_loaded_again_before_it_resumes():
    world = new_world()
    world.announce(1)
    engine = world.engines[B]
    engine.name, engine.holds, engine.paused_at = "0.0 -> 0.1", "mixed", world.now
    world.crash()
    begun = len(world.calls)
    world.pass_time(3.0)
    assert states(world)[B] == ("serving", "0.1")
    calls = [call.kind for call in world.calls[begun:] if call.address == B and call.kind != "probe"]
    assert calls == ["check", "pause", "load", "resume"]


def test_no_server_is_paused_while_an_evaluation_holds_the_served_version_and_the_reason_names_it():
    world = new_world()
    world.announce(1)
    world.target = world.target._replace(hold=("e1", 12.0))
    world.pass_time(5.0)
    assert {call.kind for call in world.calls} == {"probe", "check"}
    (reason,) = world.controller.reasons()
    assert "evaluation e1 holds version 0.0 for up to 12 s" in reason.message
    world.announce(2)
    world.target = world.target._replace(hold=("", 0.0))
    world.pass_time(3.0)
    assert states(world) == {A: ("serving", "0.2"), B: ("serving", "0.2")}
    assert not any(call.version == Version(0, 1) for call in world.calls if call.kind == "load")


def test_a_restarted_server_takes_no_requests_before_it_has_caught_up():
    world = new_world()
    world.announce(1)
    world.pass_time(3.0)
    world.die(B)
    observed = set()
    for _ in range(300):
        world.pass_time(0.01)
        observed.add(states(world)[B])
    assert ("serving", "0.0") not in observed
    assert states(world)[B] == ("serving", "0.1")


def test_no_request_waits_in_a_paused_server_for_longer_than_the_pause_lease_whoever_paused_it():
    world = new_world()
    world.engines[A].paused_at = world.now
    world.pass_time(LEASE_S - 1)
    assert states(world)[A][0] == "syncing"
    world.pass_time(3.0)
    assert (states(world)[A], world.engines[A].paused_at) == (("serving", "0.0"), None)


def test_weights_for_a_run_without_servers_are_a_reason_with_advice():
    world = World([], SyncSpec())
    world.announce(1)
    world.pass_time(1.0)
    (reason,) = world.controller.reasons()
    assert "policy.endpoints" in reason.message


def test_a_draining_server_gets_no_new_weights_and_a_removed_server_is_not_left_paused():
    world = new_world()
    world.listed[B] = True
    world.announce(1)
    while world.engines[A].paused_at is None:
        world.pass_time(0.01)
    del world.listed[A]
    world.pass_time(3.0)
    assert (states(world)[B], world.engines[A].paused_at) == (("draining", "0.0"), None)

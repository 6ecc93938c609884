"""The router: which server takes the next request. Pure; the clock is moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_workers.policies import router as module
from headrace_workers.policies.router import FAILURES_IN_A_ROW, ServerRouter, share_of
from tests.workers.fakes import Clock

A, B, C = "http://a", "http://b", "http://c"
POOL = [A, B, C]


def choose(router: ServerRouter, episode: str = "e", group: str = "g", pool: list[str] | None = None) -> str | None:
    return router.choose(pool if pool is not None else POOL, policy="p", group=group, episode=episode)


def send(router: ServerRouter, episode: str, group: str = "g", pool: list[str] | None = None) -> str:
    address = choose(router, episode, group, pool)
    assert address is not None
    router.sent(address)
    return address


def suspend(router: ServerRouter, address: str) -> None:
    router.sent(address)
    router.failed(address, "nobody listens", at_once=True)


def test_the_server_with_the_fewest_open_requests_gets_the_first_request_of_a_group() -> None:
    router = ServerRouter(Clock())
    for address in (A, A, B):
        router.sent(address)
    assert choose(router) == C


def test_an_episode_and_its_group_stay_on_their_server() -> None:
    router = ServerRouter(Clock())
    home = send(router, "e1")
    router.answered(home)
    assert [choose(router, episode) for episode in ("e1", "e1", "e2", "e3")] == [home] * 4


def test_an_episode_leaves_a_server_that_has_more_than_its_share() -> None:
    router = ServerRouter(Clock())
    home = send(router, "e1")
    router.answered(home)
    for _ in range(10):
        router.sent(home)
    assert choose(router, "e1") != home


def test_workers_choose_the_same_server_for_a_group_if_all_are_equally_busy() -> None:
    groups = [f"g{number}" for number in range(30)]
    first, second = ServerRouter(Clock()), ServerRouter(Clock())
    chosen = [choose(first, group, group) for group in groups]
    assert chosen == [choose(second, group, group, pool=[C, A, B]) for group in groups]
    assert set(chosen) == set(POOL)


def test_a_server_is_suspended_after_several_failures_in_a_row_and_not_after_single_ones() -> None:
    router = ServerRouter(Clock())
    for _ in range(FAILURES_IN_A_ROW - 1):
        router.sent(A)
        router.failed(A, "500")
    router.sent(A)
    router.answered(A)
    assert router.is_available(A)
    for _ in range(FAILURES_IN_A_ROW):
        router.sent(A)
        router.failed(A, "500")
    assert not router.is_available(A)
    assert router.server(A).reason == "500"


def test_a_server_is_suspended_for_longer_each_time_and_again_after_one_failure() -> None:
    clock = Clock()
    router = ServerRouter(clock)
    suspend(router, A)
    assert router.due_for_probe() == []
    clock.now += module.FIRST_SUSPENSION_S
    assert router.due_for_probe() == [A]
    router.probed(A, "still nobody")
    clock.now += module.FIRST_SUSPENSION_S
    assert router.due_for_probe() == []
    clock.now += module.FIRST_SUSPENSION_S
    router.probed(A, "")
    assert router.is_available(A)
    router.sent(A)
    router.failed(A, "500")
    assert not router.is_available(A)  # one failure is enough for it now
    assert router.server(A).suspensions == 3


def test_a_suspended_server_returns_when_a_request_succeeds() -> None:
    router = ServerRouter(Clock())
    router.sent(A)
    suspend(router, A)
    router.answered(A)
    assert router.is_available(A)
    assert router.server(A).suspensions == 0


def test_if_all_are_suspended_the_one_whose_suspension_ends_first_is_used() -> None:
    clock = Clock()
    router = ServerRouter(clock)
    for address in (B, A, C):
        suspend(router, address)
        clock.now += 0.1
    assert choose(router) == B


def test_an_empty_pool_has_no_server() -> None:
    assert choose(ServerRouter(Clock()), pool=[]) is None


def test_a_removed_server_is_forgotten_once_it_has_no_open_request() -> None:
    router = ServerRouter(Clock())
    router.sent(A)
    router.server(B)
    router.forget_except(keep=[])
    assert set(router.servers) == {A}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "answered", "failed", "released", "dead", "probe", "wait", "leave", "join"]),
        st.integers(0, 7),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_every_choice_is_available_and_within_its_share_and_keeps_affinity_if_possible(
    events: list[tuple[str, int]],
) -> None:
    clock = Clock()
    router = ServerRouter(clock)
    pool = list(POOL)
    homes: dict[str, str] = {}
    opened: list[str] = []
    for event, number in events:
        address = POOL[number % 3]
        if event == "send" and pool:
            _check_choice(router, pool, homes, f"e{number}")
            opened.append(homes[f"e{number}"])
        elif event == "probe" and not router.is_available(address):
            router.probed(address, "" if number % 2 else "dead")
        elif event == "wait":
            clock.now += number
        elif event == "leave" and address in pool:
            pool.remove(address)
        elif event == "join" and address not in pool:
            pool.append(address)
        elif opened and event in ("answered", "failed", "released", "dead"):
            address = opened.pop(number % len(opened))
            if event in ("answered", "released"):
                getattr(router, event)(address)
            else:
                router.failed(address, event, at_once=event == "dead")
        assert all(server.open == opened.count(server.address) for server in router.servers.values())


def _check_choice(router: ServerRouter, pool: list[str], homes: dict[str, str], episode: str) -> None:
    inside = [address for address in pool if router.is_available(address)]
    share = share_of(sum(router.server(address).open for address in inside), max(1, len(inside)))
    home = homes.get(episode)
    chosen = send(router, episode, group=f"g{episode}", pool=pool)
    assert chosen in (inside or pool)
    if inside and len(pool) > 1:
        assert router.server(chosen).open <= share
        if home in inside and router.server(home).open - (home == chosen) < share:
            assert chosen == home
    homes[episode] = chosen


@pytest.mark.parametrize(("open_requests", "servers", "share"), [(0, 1, 2), (0, 2, 1), (7, 2, 6), (63, 4, 24)])
def test_a_share_is_half_as_much_again_as_the_mean_with_the_new_request(
    open_requests: int, servers: int, share: int
) -> None:
    assert share_of(open_requests, servers) == share

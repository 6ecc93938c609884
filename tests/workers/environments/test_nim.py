"""Rules of Nim, and the contract of its module."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environment import MultiAgentEnvironment
from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace_workers.environments.nim import Nim
from headrace_workers.tiny_policy.situations import Heaps, read_situation


def take(heap: int, count: int) -> str:
    return f"\\boxed{{{heap} {count}}}"


def started(heaps=(1, 2)) -> tuple[Nim, str, str]:
    environment = Nim(heaps=heaps)
    environment.reset(0)
    mover = environment.next_agent()
    other = next(agent for agent in environment.agents if agent != mover)
    return environment, mover, other


def test_it_is_a_multi_agent_environment():
    assert isinstance(Nim(), MultiAgentEnvironment)


def test_the_action_is_the_last_boxed_heap_and_count():
    environment, _, other = started()
    environment.step("\\boxed{1 1}, rather \\boxed{2, 2}")
    assert environment.next_agent() == other
    assert environment.step(take(1, 1))[1][other] == 1.0


def test_without_a_move_the_game_ends_with_a_format_error_of_the_mover_only():
    environment, mover, other = started()
    _, rewards, terminated, truncated, info = environment.step("I pass")
    assert rewards == {mover: -0.1, other: 0.0}
    assert all(terminated.values())
    assert not any(truncated.values())
    assert info["outcome"] == "format_error"


@pytest.mark.parametrize("action", [take(0, 1), take(3, 1), take(1, 0), take(1, 2)])
def test_an_illegal_move_loses_the_game(action):
    environment, mover, other = started()
    _, rewards, terminated, _, info = environment.step(action)
    assert rewards == {mover: -1.0, other: 1.0}
    assert all(terminated.values())
    assert info["outcome"] == "illegal_move"


def test_the_agent_that_did_not_make_the_last_move_gets_its_reward_late():
    environment, mover, other = started()
    _, first, *_ = environment.step(take(2, 2))
    assert first == {mover: 0.0}
    observations, last, _, _, _ = environment.step(take(1, 1))
    assert last == {other: 1.0, mover: -1.0}
    assert set(observations) == {mover, other}
    assert environment.next_agent() is None


@given(st.integers(0, 2**32))
def test_the_seed_determines_the_heaps_and_the_starter(seed):
    assert Nim().reset(seed) == Nim().reset(seed)


def test_different_seeds_give_different_heaps_and_starters():
    infos = [Nim().reset(seed)[1] for seed in range(60)]
    assert {info["starter"] for info in infos} == {"player_0", "player_1"}
    assert {size for info in infos for size in info["heaps"]} == {1, 2, 3, 4, 5}


@given(st.integers(0, 2**32), st.data())
def test_each_observation_names_all_heaps_and_play_is_zero_sum(seed, data):
    environment = Nim()
    observations, info = environment.reset(seed)
    seen = dict(observations)
    heaps = info["heaps"]
    totals = dict.fromkeys(environment.agents, 0.0)
    while (mover := environment.next_agent()) is not None:
        assert read_situation(seen[mover]) == Heaps(tuple(heaps))
        heap = data.draw(st.sampled_from([at for at, size in enumerate(heaps) if size]))
        observations, rewards, _, _, info = environment.step(take(heap + 1, data.draw(st.integers(1, heaps[heap]))))
        heaps = info["heaps"]
        for agent, text in observations.items():
            seen[agent] += text
        for agent, reward in rewards.items():
            totals[agent] += reward
    assert sorted(totals.values()) == [-1.0, 1.0]
    assert info["mover"] == max(totals, key=totals.__getitem__)


def test_a_heap_can_be_empty_at_the_start():
    environment, _, _ = started(heaps=(0, 1))
    assert environment.step(take(2, 1))[4]["outcome"] == "win"


@pytest.mark.parametrize("kwargs", [{"heaps": [0, 0]}, {"heaps": []}, {"heaps": [-1, 2]}, {"heap_count": 0}])
def test_invalid_rules_are_refused(kwargs):
    with pytest.raises(InvalidRequest):
        Nim(**kwargs)


def test_a_step_out_of_order_is_a_failure():
    with pytest.raises(EnvironmentFailure):
        Nim().step(take(1, 1))

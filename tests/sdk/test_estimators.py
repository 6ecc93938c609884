from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from headrace.errors import EstimatorFailed, InvalidRequest
from headrace.estimators import (
    ESTIMATORS,
    Estimator,
    Experience,
    advantages,
    episode_rewards,
    gae_token,
    gae_turn,
    group_statistics,
    returns_to_go,
)
from headrace.moments import Moments, merge_all
from headrace.validation import MAX_REWARD

NAMES = list(ESTIMATORS)
CASES = json.loads((Path(__file__).parent.parent / "vectors" / "estimators.json").read_text())["cases"]
COMPARED = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def flat(tree: Any) -> list[float]:
    return [leaf for branch in tree for leaf in flat(branch)] if isinstance(tree, list) else [tree]


def experience_of(trajectories: list[dict[str, Any]]) -> Experience:
    names = list(dict.fromkeys(item["group"] for item in trajectories))
    return Experience(
        rewards=np.array(flat([item["rewards"] for item in trajectories]), np.float64),
        tokens=np.array(flat([item["tokens"] for item in trajectories]), np.int64),
        offsets=np.cumsum([0] + [len(item["rewards"]) for item in trajectories]),
        groups=np.array([names.index(item["group"]) for item in trajectories], np.int64),
    )


def served(case: dict[str, Any], name: str) -> Any:
    keys = ("gamma", "ddof", "eps", "weighting")
    return advantages(name, experience_of(case["trajectories"]), **{key: case[key] for key in keys})


def computed(case: dict[str, Any]) -> Any:
    trajectories, experience = case["trajectories"], experience_of(case["trajectories"])
    if case["estimator"] in NAMES:
        return served(case, case["estimator"]).advantages
    values = flat([item["values"] for item in trajectories])
    after = [math.nan if item["bootstrap_value"] is None else item["bootstrap_value"] for item in trajectories]
    ends: Any = {"terminated": [item["ended"] == "terminated" for item in trajectories], "bootstrap_values": after}
    if case["estimator"] == "gae_turn":
        factors = {"gamma_per_turn": case["gamma"], "lambda_per_turn": case["lambda"]}
        return gae_turn(experience.rewards, values, experience.offsets, **factors, **ends).advantages
    factors = {"gamma_per_token": case["gamma"], "lambda_per_token": case["lambda"]}
    return gae_token(experience.rewards, experience.tokens, values, experience.offsets, **factors, **ends).advantages


def agree(computed: Any, expected: Any) -> None:
    np.testing.assert_array_less(np.abs(computed - expected), np.maximum(1e-12, 1e-9 * np.abs(expected)))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_vector_agrees(case: dict[str, Any]) -> None:
    agree(computed(case), np.array(flat(case["expected"]["advantages"])))
    if case["estimator"] not in ("gae_turn", "gae_token"):
        experience = experience_of(case["trajectories"])
        returns = returns_to_go(experience.rewards, experience.offsets, case["gamma"])
        agree(returns, np.array(flat(case["expected"]["returns"])))
    if (moments := case["expected"].get("moments")) is not None:
        whitening = served(case, case["estimator"]).whitening
        agree(np.array(astuple(whitening)), np.array([moments["n"], moments["mean"], moments["m2"]]))


def test_all_44_vectors_are_there() -> None:
    assert len({case["name"] for case in CASES}) == 44


# Properties -----------------------------------------------------------------------------------------------------


class AgentEpisode(NamedTuple):
    group: int
    rewards: list[float]
    tokens: list[int]


TURN = st.tuples(st.integers(-64, 64).map(lambda k: k / 16), st.integers(1, 50))
AGENT_EPISODE = st.tuples(st.integers(0, 3), st.lists(TURN, min_size=1, max_size=6)).map(
    lambda item: AgentEpisode(item[0], [reward for reward, _ in item[1]], [tokens for _, tokens in item[1]])
)
AGENT_EPISODES = st.lists(AGENT_EPISODE, min_size=1, max_size=16)


def experience_from(agent_episodes: list[AgentEpisode]) -> Experience:
    return Experience(
        rewards=np.array(flat([agent_episode.rewards for agent_episode in agent_episodes]), np.float64),
        tokens=np.array(flat([agent_episode.tokens for agent_episode in agent_episodes]), np.int64),
        offsets=np.cumsum([0] + [len(agent_episode.rewards) for agent_episode in agent_episodes]),
        groups=np.array([agent_episode.group for agent_episode in agent_episodes], np.int64),
    )


def per_agent_episode(values: Any, agent_episodes: list[AgentEpisode]) -> list[Any]:
    return np.split(values, np.cumsum([len(agent_episode.rewards) for agent_episode in agent_episodes])[:-1])


@settings(deadline=None, max_examples=60)
@given(
    AGENT_EPISODES,
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.randoms(use_true_random=False),
)
def test_advantages_do_not_depend_on_the_order_of_trajectories(agent_episodes, name, gamma, rng) -> None:
    order = list(range(len(agent_episodes)))
    rng.shuffle(order)
    shuffled = [agent_episodes[k] for k in order]
    one = per_agent_episode(advantages(name, experience_from(agent_episodes), gamma=gamma).advantages, agent_episodes)
    other = per_agent_episode(advantages(name, experience_from(shuffled), gamma=gamma).advantages, shuffled)
    for position, k in enumerate(order):
        np.testing.assert_allclose(other[position], one[k], rtol=1e-9, atol=1e-11)


@settings(deadline=None, max_examples=60)
@given(AGENT_EPISODES, AGENT_EPISODES, st.sampled_from([0.5, 1.0]))
def test_statistics_of_shards_merge_to_those_of_the_whole(first, second, gamma) -> None:
    shards = [experience_from(first), experience_from(second)]
    whole = experience_from(first + second)
    merged = merge_all(Moments.of(returns_to_go(s.rewards, s.offsets, gamma), s.tokens) for s in shards)
    direct = Moments.of(returns_to_go(whole.rewards, whole.offsets, gamma), whole.tokens)
    np.testing.assert_allclose(astuple(merged), astuple(direct), rtol=1e-9, atol=1e-9)
    for group in range(4):
        parts = [group_statistics(s) for s in shards]
        merged_moments = merge_all(part.moments(group) for part in parts if group < len(part.n))
        totals = group_statistics(whole)
        expected = totals.moments(group) if group < len(totals.n) else Moments()
        np.testing.assert_allclose(astuple(merged_moments), astuple(expected), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    AGENT_EPISODES,
    st.sampled_from([name for name in NAMES if name != "reinforce"]),
    st.sampled_from([0.0, 0.1, 1000.7, -123456.789]),
    st.sampled_from([0.0, 1e-9]),
)
def test_constant_returns_give_advantage_0_also_with_eps_0(agent_episodes, name, value, eps) -> None:
    constant = [AgentEpisode(s.group, [0.0] * (len(s.rewards) - 1) + [value], s.tokens) for s in agent_episodes]
    values = advantages(name, experience_from(constant), gamma=1.0, eps=eps).advantages
    assert not np.any(values)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce"])
@pytest.mark.parametrize("base", [1.0, 0.3, -0.7, 900.5])
def test_a_spread_within_the_rounding_errors_of_float32_rewards_counts_as_none(name: str, base: float) -> None:
    close = [float(np.nextafter(np.float32(base), np.float32(sign * np.inf))) for sign in (-1, 1)]
    agent_episodes = [AgentEpisode(0, [reward], [3]) for reward in (*close, float(np.float32(base)), close[1])]
    estimate = advantages(name, experience_from(agent_episodes), gamma=1.0, eps=0.0)
    assert estimate.advantages.tolist() == [0.0] * 4
    assert estimate.groups.zero_variance.tolist() == [True]


@pytest.mark.parametrize("name", COMPARED)
def test_the_same_spread_of_float64_rewards_is_a_spread(name: str) -> None:
    agent_episodes = [AgentEpisode(0, [reward], [3]) for reward in (0.1, 0.1 + 1.2e-7)]
    estimate = advantages(name, experience_from(agent_episodes), gamma=1.0, eps=0.0)
    assert estimate.advantages[1] > 0
    assert not estimate.groups.zero_variance.any()


def test_large_float32_rewards_that_cancel_keep_their_rounding_errors() -> None:
    rewards = [[4096.25, -4096.0], [4096.25, float(np.nextafter(np.float32(-4096.0), np.float32(0)))]]
    agent_episodes = [AgentEpisode(0, values, [3, 3]) for values in rewards]
    assert group_statistics(experience_from(agent_episodes)).zero_variance.tolist() == [True]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]), ddof=st.sampled_from([0, 1]))
@settings(max_examples=40)
def test_rewards_within_the_bound_give_returns_and_advantages_that_are_finite_in_float32(
    name: str, data: st.DataObject, gamma: float, ddof: int
) -> None:
    bounded = st.sampled_from([MAX_REWARD, -MAX_REWARD, 0.0, 1.0, 1e-300, 1e-12, math.nextafter(MAX_REWARD, 0.0)])
    turns = st.lists(bounded, min_size=1, max_size=4)
    episodes = data.draw(st.lists(st.tuples(st.integers(0, 1), turns), min_size=1, max_size=6))
    agent_episodes = [AgentEpisode(group, rewards, [2] * len(rewards)) for group, rewards in episodes]
    experience = experience_from(agent_episodes)
    ddof = 0 if ESTIMATORS[name].by_tokens else ddof
    estimate = advantages(name, experience, gamma=gamma, ddof=ddof, eps=0.0)
    moments = [estimate.groups.moments(group) for group in range(len(estimate.groups.n))]
    squares = [merge_all([*moments, *([] if estimate.whitening is None else [estimate.whitening])]).m2]
    for values in (estimate.returns, estimate.advantages, np.array(squares)):
        assert np.isfinite(values.astype(np.float32)).all()


@pytest.mark.parametrize("name", COMPARED)
def test_a_group_of_one_gets_advantage_0_and_is_flagged(name: str) -> None:
    agent_episodes = [AgentEpisode(0, [1.0], [3]), AgentEpisode(1, [1.0], [3]), AgentEpisode(1, [0.0], [3])]
    estimate = advantages(name, experience_from(agent_episodes), gamma=1.0, eps=0.0)
    assert estimate.advantages[0] == 0.0
    assert estimate.advantages[1] > 0.0
    assert estimate.groups.single.tolist() == [True, False]
    assert estimate.groups.zero_variance.tolist() == [False, False]


def test_a_group_states_its_expected_and_its_actual_size() -> None:
    agent_episodes = [
        AgentEpisode(0, [1.0], [3]),
        AgentEpisode(0, [0.0], [3]),
        AgentEpisode(1, [2.0], [3]),
        AgentEpisode(1, [2.0], [3]),
    ]
    groups = group_statistics(experience_from(agent_episodes)._replace(expected=np.array([4, 2, 3])))
    assert groups.expected.tolist() == [4, 2, 3]
    assert groups.actual.tolist() == [2, 2, 0]
    assert groups.zero_variance.tolist() == [False, True, False]
    assert groups.moments(0) == Moments(2.0, 0.5, 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_turns_outside_rows_have_returns_but_are_not_counted(name: str) -> None:
    agent_episodes = [AgentEpisode(0, [0.0, 5.0, 1.0], [2, 90, 2]), AgentEpisode(0, [1.0, 0.5], [2, 3])]
    trained = np.array([True, False, True, True, True])
    estimate = advantages(name, experience_from(agent_episodes)._replace(trained=trained), gamma=0.5)
    assert estimate.returns[0] == 0.5 * (5.0 + 0.5 * 1.0)
    assert estimate.advantages[1] == 0.0
    if estimate.whitening is not None:
        assert estimate.whitening.n == (4 if name == "rebn" else 9)
    if name == "dr_grpo":
        assert estimate.advantages[0] == 6.0 - 3.75


@pytest.mark.parametrize("name", NAMES)
def test_an_array_that_marks_every_turn_as_trained_changes_nothing(name: str) -> None:
    experience = experience_from([AgentEpisode(0, [0.0, 5.0, 1.0], [2, 90, 2]), AgentEpisode(0, [1.0, 0.5], [2, 3])])
    without = advantages(name, experience, gamma=0.5)
    marked = advantages(name, experience._replace(trained=np.ones(5, np.bool_)), gamma=0.5)
    assert marked.advantages.tolist() == without.advantages.tolist()
    assert marked.whitening == without.whitening
    assert not np.shares_memory(without.advantages, without.returns)


def test_rewards_of_an_episode_are_not_discounted() -> None:
    assert episode_rewards([1.0, 2.0, 4.0], [0, 2, 2, 3]).tolist() == [3.0, 0.0, 4.0]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_cover_one_agent_episode_only(gamma: float) -> None:
    returns = returns_to_go([1.0, 2.0, 4.0, 8.0], [0, 3, 3, 4], gamma)
    assert returns.tolist() == [1.0 + gamma * (2.0 + gamma * 4.0), 2.0 + gamma * 4.0, 4.0, 8.0]
    assert returns_to_go([], [0], gamma).tolist() == []


@settings(deadline=None, max_examples=60)
@given(AGENT_EPISODES, st.sampled_from([0.5, 0.99, 1.0]))
def test_gae_with_lambda_1_and_zero_values_is_the_return(agent_episodes, gamma) -> None:
    e = experience_from(agent_episodes)
    estimate = gae_turn(
        e.rewards,
        np.zeros(len(e.rewards)),
        e.offsets,
        gamma_per_turn=gamma,
        lambda_per_turn=1.0,
        terminated=[True] * len(agent_episodes),
    )
    np.testing.assert_allclose(estimate.advantages, returns_to_go(e.rewards, e.offsets, gamma), atol=1e-12)


def test_gae_bootstraps_truncated_agent_episodes_and_flags_those_without_a_value() -> None:
    estimate = gae_turn(
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [0, 1, 2, 3],
        gamma_per_turn=0.5,
        lambda_per_turn=0.5,
        terminated=[True, False, False],
        bootstrap_values=[8.0, 8.0, math.nan],
    )
    assert estimate.advantages.tolist() == [-1.0, 3.0, -1.0]
    assert estimate.targets.tolist() == [0.0, 4.0, 0.0]
    assert estimate.bootstrapped_with_zero.tolist() == [False, False, True]


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 rewards, 3 values"):
        gae_turn([0.0, 1.0], [1.0] * 3, [0, 2], gamma_per_turn=1.0, lambda_per_turn=1.0, terminated=[True])
    with pytest.raises(InvalidRequest, match="has no sampled tokens"):
        gae_token([1.0], [0], [], [0, 1], gamma_per_token=1.0, lambda_per_token=1.0, terminated=[True])


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="No estimator 'gae'"):
        advantages("gae", experience_from([AgentEpisode(0, [1.0], [1])]), gamma=1.0)


def test_token_weighting_takes_ddof_0_only() -> None:
    with pytest.raises(InvalidRequest, match="takes ddof 0, not 1"):
        advantages("rebn", experience_from([AgentEpisode(0, [1.0], [1])]), gamma=1.0, ddof=1, weighting="token")


# Estimators of other packages -----------------------------------------------------------------------------------


def estimate_with(values: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """Compute two turns with an estimator of another package."""
    monkeypatch.setitem(ESTIMATORS, "own", Estimator(values, **fields))
    return advantages("own", experience_from([AgentEpisode(0, [1.0, 2.0], [3, 3])]), gamma=1.0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda inputs: inputs.returns * np.nan, r"returned nan for turn 0 of 2"),
        (lambda inputs: np.array([0.0, np.inf]), r"returned inf for turn 1 of 2"),
        (lambda inputs: np.array([0.0, 1e39]), r"returned 1e\+39 for turn 1 of 2"),
        (lambda inputs: inputs.returns[:1], r"returned an array of shape \(1,\), not \(2,\)"),
        (lambda inputs: inputs.returns[:, None], r"returned an array of shape \(2, 1\), not \(2,\)"),
        (lambda inputs: 0.0, r"returned an array of shape \(\), not \(2,\)"),
        (lambda inputs: None, r"returned nan|raised TypeError|shape \(\)"),
        (lambda inputs: 1 / 0, r"raised ZeroDivisionError: division by zero"),
        (lambda inputs: sys.exit("over"), r"raised SystemExit: over"),
        (lambda inputs: np.negative(inputs.returns, out=inputs.returns), r"raised ValueError: .*read-only"),
        (lambda inputs: inputs.experience.rewards.sort(), r"raised ValueError: .*read-only"),
    ],
)
@pytest.mark.parametrize("whiten", [False, True])
def test_an_estimator_that_fails_is_a_typed_error_that_names_it(
    values: Any, said: str, whiten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EstimatorFailed, match=f"Estimator 'own' .*({said})") as caught:
        estimate_with(values, monkeypatch, whiten=whiten)
    assert caught.value.extra == {"estimator": "own"}


def test_the_values_of_turns_that_are_not_trained_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "own", Estimator(lambda inputs: np.array([np.nan, 2.0])))
    experience = experience_from([AgentEpisode(0, [1.0, 2.0], [3, 3])])._replace(trained=np.array([False, True]))
    assert advantages("own", experience, gamma=1.0).advantages.tolist() == [0.0, 2.0]
    assert experience.rewards.flags.writeable, "the caller's arrays are not changed"

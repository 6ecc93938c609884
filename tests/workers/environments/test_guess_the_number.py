"""Rules of guess the number, and the contract of its module."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace_workers.environments.guess_the_number import GuessTheNumber, RandomGuessTheNumber
from headrace_workers.tiny_policy.situations import Guess, read_situation


def guess(number: object) -> str:
    return f"I try \\boxed{{{number}}}."


def started(**kwargs) -> GuessTheNumber:
    environment = GuessTheNumber(**{"low": 1, "high": 50, "max_turns": 5, "target": 20, **kwargs})
    environment.reset(0)
    return environment


def test_the_action_is_the_last_boxed_digits():
    step = started().step("First \\boxed{1}, then \\boxed{2}, no: \\boxed{ 20 }.")
    assert (step.reward, step.terminated) == (1.0, True)


@pytest.mark.parametrize(
    "action", ["", "20", "\\boxed{}", "\\boxed{twenty}", "\\boxed{-20}", "\\boxed{2.0}", "\\boxed{" + "1" * 5000 + "}"]
)
def test_without_one_the_episode_ends_with_a_format_error(action):
    step = started().step(action)
    assert (step.reward, step.terminated, step.truncated) == (-0.1, True, False)
    assert step.info["outcome"] == "format_error"


def test_a_guess_outside_the_range_or_a_repeated_one_costs_only_its_turn():
    environment = started()
    outside = environment.step(guess(51))
    zero = environment.step(guess(0))
    first = environment.step(guess(30))
    again = environment.step(guess(30))
    assert [step.reward for step in (outside, zero, first, again)] == [0.0] * 4
    assert not any(step.terminated for step in (outside, zero, first, again))
    assert "outside 1 to 50" in outside.observation
    assert "outside 1 to 50" in zero.observation
    assert "30 was tried before" in again.observation
    assert "secret number is lower than 30" in again.observation
    assert again.info["turn"] == 4


def test_a_correct_guess_earns_1_and_ends_the_game():
    environment = started()
    environment.step(guess(10))
    step = environment.step(guess(20))
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.info["target"] == 20
    assert step.info["reward_parts"] == {"win": 1.0}


@pytest.mark.parametrize(
    ("last", "reward"), [(21, 1 - 1 / 49), (50, 1 - 30 / 49), (1, 1 - 19 / 49), (99, 0.0), (0, 0.0)]
)
def test_the_last_turn_earns_by_nearness(last, reward):
    environment = started(max_turns=2)
    environment.step(guess(2))
    step = environment.step(guess(last))
    assert step.reward == pytest.approx(reward, abs=1e-15)
    assert step.info["outcome"] == "out_of_turns"


def test_the_last_turn_earns_nothing_with_success_only():
    environment = started(max_turns=1, success_only=True)
    assert environment.step(guess(21)).reward == 0.0
    environment.reset(0)
    assert environment.step(guess(20)).reward == 1.0
    environment.reset(0)
    assert environment.step("?").reward == -0.1


def test_the_turn_limit_is_a_rule_of_the_game_it_terminates_and_never_truncates():
    step = started(max_turns=1).step(guess(1))
    assert (step.terminated, step.truncated) == (True, False)


def test_a_correct_guess_at_the_last_turn_is_a_win():
    step = started(max_turns=1).step(guess(20))
    assert (step.reward, step.info["outcome"]) == (1.0, "win")


@given(st.integers(0, 2**32), st.data())
def test_every_hint_is_stated_in_full_so_the_transcript_alone_gives_the_state(seed, data):
    environment = GuessTheNumber(1, 50, 20)
    transcript, _ = environment.reset(seed)
    low, high = 1, 50
    while True:
        assert read_situation(transcript) == Guess(low, high)
        number = data.draw(st.integers(low, high))
        step = environment.step(guess(number))
        if step.terminated:
            break
        transcript += step.observation
        low, high = (number + 1, high) if "higher" in step.observation else (low, number - 1)


@given(st.integers(0, 2**63), st.lists(st.integers(0, 60), max_size=8))
def test_the_seed_determines_the_secret_and_for_the_random_variant_the_range(seed, guesses):
    def play(disturbance):
        random.seed(disturbance)
        environment = RandomGuessTheNumber()
        seen = [environment.reset(seed)]
        for number in guesses:
            step = environment.step(guess(number))
            seen.append(step)
            if step.terminated:
                break
        return seen

    state = random.getstate()
    try:
        assert play(1) == play(2)
    finally:
        random.setstate(state)


@given(st.integers(0, 2**32))
def test_the_random_variant_stays_in_its_ranges(seed):
    _, info = RandomGuessTheNumber().reset(seed)
    assert 1 <= info["low"] <= 10
    assert info["low"] + 5 <= info["high"] <= info["low"] + 50
    count = info["high"] - info["low"] + 1
    assert (info["max_turns"] - 2) ** 2 < count <= (info["max_turns"] - 1) ** 2


def test_all_secrets_of_a_range_are_drawn():
    environment = GuessTheNumber(1, 10, 1)
    secrets = set()
    for seed in range(200):
        environment.reset(seed)
        secrets.add(environment.step("?").info["target"])
    assert secrets == set(range(1, 11))


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("game:GuessTheNumber-v0-easy", (1, 10, 4)),
        ("game:GuessTheNumber-v0-hard", (1, 50, 7)),
        ("game:GuessTheNumber-v0", (1, 50, 7)),
    ],
)
def test_the_ids_have_their_rules_and_take_kwargs(name, rules):
    _, info = headrace.make(name).reset(0)
    assert (info["low"], info["high"], info["max_turns"]) == rules
    _, info = headrace.make(name, max_turns=3, success_only=True).reset(0)
    assert info["max_turns"] == 3


@pytest.mark.parametrize(
    "kwargs", [{"low": 5, "high": 5}, {"low": -1}, {"max_turns": 0}, {"target": 51}, {"target": 0}]
)
def test_invalid_rules_are_refused(kwargs):
    with pytest.raises(InvalidRequest):
        GuessTheNumber(**kwargs)


def test_a_step_out_of_order_is_a_failure():
    environment = GuessTheNumber()
    with pytest.raises(EnvironmentFailure) as before:
        environment.step(guess(1))
    assert before.value.kind == "step-out-of-order"
    environment.reset(0)
    environment.step("?")
    with pytest.raises(EnvironmentFailure):
        environment.step(guess(1))

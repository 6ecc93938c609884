"""The game of examples/kinds.py: it conforms to the protocol, and random bytes earn a reward."""

from __future__ import annotations

import random
import statistics

from examples.kinds import KINDS, Kinds
from headrace_workers.environments.conformance import check_environment


def played(seed: int, *actions: str) -> list[float]:
    """Play a game to its end and return its rewards."""
    game, rewards = Kinds(turns=3), []
    game.reset(seed)
    for action in actions:
        step = game.step(action)
        rewards.append(step.reward)
        if step.terminated:
            break
    return rewards


def test_kinds_keeps_the_protocol() -> None:
    assert check_environment(Kinds, actions=["abcdefgh", "ABCD", "!?", "", "a"]) == []


def test_a_turn_earns_its_share_of_characters_that_are_of_the_kind() -> None:
    game = Kinds(turns=3, length=8)
    kind, _ = game.reset(0)
    right = KINDS[kind][0]
    assert game.step(right * 2 + "é" + right).reward == 3 / 8


def test_an_answer_with_the_requested_characters_earns_everything() -> None:
    game = Kinds(turns=3)
    game.reset(0)
    assert played(0, *[KINDS[kind][-1] * 8 for kind in game.requests]) == [1.0, 1.0, 1.0]


def test_characters_beyond_the_length_earn_nothing() -> None:
    assert max(max(played(seed, *["aA!" * 20] * 3)) for seed in range(20)) < 0.5


def test_a_turn_without_a_hit_ends_the_game() -> None:
    assert [played(seed, "") for seed in range(3)] == [[0.0]] * 3


def test_random_bytes_earn_a_little_and_a_single_kind_a_third() -> None:
    draw = random.Random(0)
    noise = [[draw.randbytes(8).decode(errors="replace") for _ in range(3)] for _ in range(300)]
    assert 0.1 < statistics.fmean(sum(played(seed, *actions)) for seed, actions in enumerate(noise)) < 0.5
    assert statistics.fmean(sum(played(seed, *["a" * 8] * 3)) for seed in range(300)) < 1.0

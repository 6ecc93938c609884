"""A game for an untrained model: answer with characters of the requested kind.

Each turn asks for one of three kinds, and every character of that kind earns a part of the turn's reward. About one
byte in ten is of a kind, so random bytes earn a little and each better byte earns more: the first batch already has a
gradient. A policy that always answers with the same kind gets a third of the reward; for the rest it must read the
prompt. A turn without a hit ends the game, so early turns affect later ones.
"""

from __future__ import annotations

import random
import string
from typing import Any

import headrace

KINDS = {"a-z": string.ascii_lowercase, "A-Z": string.ascii_uppercase, "!-~": string.punctuation}


class Kinds:
    """``turns`` turns of at most ``length`` characters. A turn earns its share of hits, from 0 to 1."""

    blocking = False  # a step takes microseconds, so it needs no thread

    def __init__(self, turns: int = 4, length: int = 8) -> None:
        self.turns, self.length = turns, length

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.requests = random.Random(seed).choices(list(KINDS), k=self.turns)
        self.turn = 0
        return self.requests[0], {}

    def step(self, action: str) -> headrace.Step:
        kind = KINDS[self.requests[self.turn]]
        hits = sum(character in kind for character in action[: self.length])
        self.turn += 1
        over = hits == 0 or self.turn == self.turns
        observation = "Over." if over else self.requests[self.turn]
        return headrace.Step(observation, hits / self.length, over, False, {"reward_parts": {"hits": float(hits)}})


headrace.register("example:Kinds", Kinds)

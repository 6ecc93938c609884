"""A game of single tokens for a model that knows nothing: answer with characters of the kind that is asked for.

Each turn asks for one of three kinds. Every character of the answer that is of the kind earns a part of the turn's
reward. About one byte in ten is of the kind, so bytes drawn at random earn a little and each better byte earns more:
there is a gradient from the first batch on. Who always answers with one kind gets a third; the rest takes reading what
is asked. A turn without any hit ends the game, so early turns decide about later ones.
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
        self.asked = random.Random(seed).choices(list(KINDS), k=self.turns)
        self.turn = 0
        return self.asked[0], {}

    def step(self, action: str) -> headrace.Step:
        kind = KINDS[self.asked[self.turn]]
        hits = sum(character in kind for character in action[: self.length])
        self.turn += 1
        over = hits == 0 or self.turn == self.turns
        observation = "Over." if over else self.asked[self.turn]
        return headrace.Step(observation, hits / self.length, over, False, {"reward_parts": {"hits": float(hits)}})


headrace.register("example:Kinds", Kinds)

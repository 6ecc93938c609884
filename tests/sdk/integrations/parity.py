"""``test:Parity``: the reward is the share of characters with an even code, so that random actions differ in reward."""

from __future__ import annotations

from typing import Any, ClassVar

from headrace.environment import Step, register


class Parity:
    """An environment with a fixed number of turns."""

    blocking: ClassVar[bool] = False

    def __init__(self, turns: int = 2, example: dict[str, Any] | None = None) -> None:
        self.turns, self.example = turns, example or {}

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return str(self.example.get("prompt", "Even, please.")), {}

    def step(self, action: str) -> Step:
        self.turn += 1
        even = sum(ord(letter) % 2 == 0 for letter in action)
        return Step("Again.", even / max(1, len(action)), self.turn == self.turns, False, {})


register("test:Parity", Parity)

r"""Nim: two agents take objects from heaps in turn; taking the last object wins.

* The action is the last ``\boxed{heap count}``; without one the game ends, with a format error of the mover only.
* An illegal move loses the game.
* The winner gets +1 and the loser -1; the agent that did not make the last move gets its reward late.
* The seed determines the heaps and the starter.
* Each observation names all heaps, so the last one gives the full state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.environment import Observation
from headrace.errors import InvalidRequest
from headrace_workers.environments.answers import FORMAT_ERROR
from headrace_workers.environments.call_order import out_of_order_error

_MOVE = re.compile(r"\\boxed\s*\{\s*([0-9]{1,9})[\s,]+([0-9]{1,9})\s*\}")

MultiStep = tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]


class Nim:
    """``heap_count`` heaps of 1 to ``max_heap`` objects drawn by the seed, or exactly ``heaps`` if given."""

    blocking: ClassVar[bool] = False

    def __init__(self, heap_count: int = 3, max_heap: int = 5, *, heaps: Sequence[int] | None = None) -> None:
        if heaps is None and (heap_count < 1 or max_heap < 1):
            raise InvalidRequest(f"heap_count={heap_count}, max_heap={max_heap} leaves nothing to take.")
        if heaps is not None and not any(heaps):
            raise InvalidRequest(
                f"heaps={list(heaps)} leaves nothing to take.", hint="Give one heap at least one object."
            )
        if heaps is not None and min(heaps) < 0:
            raise InvalidRequest(f"heaps={list(heaps)} has a negative heap.", hint="Give sizes of 0 or more.")
        self.agents = ["player_0", "player_1"]
        self._fixed_heaps = None if heaps is None else list(heaps)
        self._heap_count = heap_count
        self._max_heap = max_heap
        self._next_agent: str | None = None

    def next_agent(self) -> str | None:
        """Return the agent to move; None before the first reset and after the end."""
        return self._next_agent

    def reset(self, seed: int | None = None) -> tuple[dict[str, Observation], dict[str, Any]]:
        """Draw the heaps and the starter, and state the rules to both agents."""
        rng = random.Random(seed)
        drawn = [rng.randint(1, self._max_heap) for _ in range(self._heap_count)]
        self._heaps = drawn if self._fixed_heaps is None else list(self._fixed_heaps)
        starter = rng.choice(self.agents)
        self._turn = 0
        self._next_agent = starter
        observations: dict[str, Observation] = {
            agent: f"Nim. Two players take objects from heaps in turn: one or more from one heap. Who takes the last "
            f"object wins. A move that the heaps do not allow loses.\n"
            f"Write your move like this: \\boxed{{heap count}}; \\boxed{{1 2}} takes two objects from the first heap.\n"
            f"{'You start' if agent == starter else 'The other player starts'}. {self._describe()}"
            for agent in self.agents
        }
        return observations, {"turn": 0, "starter": starter, "heaps": list(self._heaps)}

    def step(self, action: str) -> MultiStep:
        """Make a move of the agent to move."""
        if self._next_agent is None:
            raise out_of_order_error(self)
        mover = self._next_agent
        other = self.agents[1 - self.agents.index(mover)]
        self._turn += 1
        moves = _MOVE.findall(action)
        if not moves:
            return self._end(mover, other, "format_error", {mover: FORMAT_ERROR, other: 0.0})
        heap, count = (int(part) for part in moves[-1])
        if not (1 <= heap <= len(self._heaps) and 1 <= count <= self._heaps[heap - 1]):
            return self._end(mover, other, "illegal_move", {mover: -1.0, other: 1.0})
        self._heaps[heap - 1] -= count
        if not any(self._heaps):
            return self._end(mover, other, "win", {mover: 1.0, other: -1.0})
        self._next_agent = other
        observation = f"The other player took {count} from heap {heap}. {self._describe()}"
        info = {"turn": self._turn, "heaps": list(self._heaps)}
        return {other: observation}, {mover: 0.0}, self._flags(False), self._flags(False), info

    def _describe(self) -> str:
        return f"Heaps now: {', '.join(str(size) for size in self._heaps)}."

    def _flags(self, value: bool) -> dict[str, bool]:
        return dict.fromkeys(self.agents, value)

    def _end(self, mover: str, other: str, outcome: str, rewards: dict[str, float]) -> MultiStep:
        self._next_agent = None
        observations: dict[str, Observation]
        if outcome == "win":
            observations = {
                mover: "You took the last object and win.",
                other: "The other player took the last object and wins.",
            }
        elif outcome == "illegal_move":
            observations = {
                mover: "The heaps do not allow that move: you lose.",
                other: "The other player made a move that the heaps do not allow: you win.",
            }
        else:
            observations = {
                mover: "No move in the form \\boxed{heap count} was found.",
                other: "The other player made no readable move: the game is over.",
            }
        info = {"turn": self._turn, "outcome": outcome, "mover": mover, "heaps": list(self._heaps)}
        return observations, rewards, self._flags(True), self._flags(False), info

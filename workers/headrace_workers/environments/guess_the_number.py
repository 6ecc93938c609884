r"""Guess the number: find a secret number from hints "higher" and "lower".

* The action is the last ``\boxed{digits}``; without one the episode ends with a format error.
* A guess outside the range, or a repeated one, costs only its turn.
* A correct guess earns 1 and ends the game.
* The last turn earns by nearness, ``1 - |guess - secret| / (high - low)``, or nothing with success_only.
* The turn limit is a rule of the game: it terminates and never truncates.
* A game that a limit of the run ends is graded by the nearness of its last guess.
* Every hint is stated in full, so the transcript alone gives the state.
* The seed determines the secret, and for the random variant the range.

GEM reports both flags at the turn limit. Here the instructions state the limit and every hint states the turn, so the
limit is part of the observation and the value after it is zero: a learner must not bootstrap there.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any, ClassVar, NamedTuple

from headrace.environment import Step
from headrace.errors import InvalidRequest
from headrace_workers.environments.answers import FORMAT_ERROR
from headrace_workers.environments.call_order import out_of_order_error

_GUESS = re.compile(r"\\boxed\s*\{\s*([0-9]{1,18})\s*\}")
"""Up to 18 digits: no game needs a larger number, and parsing one would take time."""


class _Rules(NamedTuple):
    low: int
    high: int
    max_turns: int


class GuessTheNumber:
    """A secret whole number in ``[low, high]`` and at most ``max_turns`` guesses.

    ``target`` sets the secret regardless of the seed, for an evaluation over all secrets. With ``success_only`` only a
    correct guess earns a reward (a format error still costs 0.1).
    """

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        low: int = 1,
        high: int = 50,
        max_turns: int = 7,
        *,
        target: int | None = None,
        success_only: bool = False,
    ) -> None:
        if not 0 <= low < high:
            raise InvalidRequest(f"low={low}, high={high} is not a range.", hint="Choose 0 <= low < high.")
        if max_turns < 1:
            raise InvalidRequest(f"max_turns={max_turns} allows no guess.", hint="Choose max_turns >= 1.")
        if target is not None and not low <= target <= high:
            raise InvalidRequest(f"target={target} is not in {low} to {high}.", hint="Choose a target in the range.")
        self._fixed_rules = _Rules(low, high, max_turns)
        self._fixed_target = target
        self._success_only = success_only
        self._running = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the secret and state the rules."""
        rng = random.Random(seed)
        self._rules = self._draw_rules(rng)
        low, high, max_turns = self._rules
        drawn = rng.randint(low, high)
        self._target = drawn if self._fixed_target is None else self._fixed_target
        self._hints: dict[int, str] = {}
        self._turn = 0
        self._last_guess: int | None = None
        self._running = True
        instructions = (
            f"Find the secret whole number from {low} to {high}, both ends included. You have {max_turns} guesses. "
            "After a wrong guess you hear whether the secret number is higher or lower.\n"
            f"Write your guess like this: \\boxed{{{rng.randint(low, high)}}}"
        )
        return instructions, {"turn": 0, "low": low, "high": high, "max_turns": max_turns}

    def step(self, action: str) -> Step:
        """Judge one guess."""
        if not self._running:
            raise out_of_order_error(self)
        self._turn += 1
        guesses = _GUESS.findall(action)
        if not guesses:
            return self._end("No guess in the form \\boxed{number} was found.", "format_error", FORMAT_ERROR)
        guess = self._last_guess = int(guesses[-1])
        if guess == self._target:
            return self._end(f"{guess} is right, found with guess {self._turn}.", "win", 1.0)
        hint = self._hint(guess)
        if self._turn >= self._rules.max_turns:
            return self._end(f"{hint} That was the last guess.", "out_of_turns", self._nearness(guess))
        return Step(hint, 0.0, False, False, {"turn": self._turn})

    def grade(self) -> tuple[float, dict[str, Any]] | None:
        """Grade a game that a limit of the run ended, like one whose last guess was used."""
        if not self._running or self._last_guess is None:
            return None
        reward = self._nearness(self._last_guess)
        return reward, {"outcome": "cut_off", "target": self._target, "reward_parts": {"cut_off": reward}}

    def _draw_rules(self, rng: random.Random) -> _Rules:
        return self._fixed_rules

    def _hint(self, guess: int) -> str:
        low, high, max_turns = self._rules
        count = f"Guess {self._turn} of {max_turns}:"
        if not low <= guess <= high:
            return f"{count} {guess} is outside {low} to {high} and gives no hint."
        direction = "higher" if guess < self._target else "lower"
        again = f"{guess} was tried before; " if guess in self._hints else ""
        self._hints[guess] = direction
        return f"{count} {again}the secret number is {direction} than {guess}."

    def _nearness(self, guess: int) -> float:
        low, high, _ = self._rules
        if self._success_only or not low <= guess <= high:
            return 0.0
        return 1.0 - abs(guess - self._target) / (high - low)

    def _end(self, observation: str, outcome: str, reward: float) -> Step:
        self._running = False
        info = {
            "turn": self._turn,
            "outcome": outcome,
            "target": self._target,
            "reward_parts": {outcome: reward},
        }
        return Step(observation, reward, True, False, info)


class RandomGuessTheNumber(GuessTheNumber):
    """Variant with a random range: low in 1..10, high in low+5..low+50, and ⌈√(count of numbers)⌉ + 1 guesses."""

    def __init__(self, *, success_only: bool = False) -> None:
        super().__init__(success_only=success_only)

    def _draw_rules(self, rng: random.Random) -> _Rules:
        low = rng.randint(1, 10)
        high = rng.randint(low + 5, low + 50)
        return _Rules(low, high, math.ceil(math.sqrt(high - low + 1)) + 1)


def easy(**kwargs: Any) -> GuessTheNumber:
    """Make the easy variant: 1 to 10, four guesses."""
    return GuessTheNumber(**{"low": 1, "high": 10, "max_turns": 4, **kwargs})


def hard(**kwargs: Any) -> GuessTheNumber:
    """Make the hard variant: 1 to 50, seven guesses."""
    return GuessTheNumber(**{"low": 1, "high": 50, "max_turns": 7, **kwargs})

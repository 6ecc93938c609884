r"""Arithmetic: one expression, one exact answer.

* The answer is the last ``\boxed{...}``; without one the episode ends with a format error.
* Grading is exact: whole numbers, fractions and decimals are compared as fractions, never as floats.
* A correct answer earns 1, any other 0; the episode has one turn.
* The seed determines the expression.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Any, ClassVar

from headrace.environment import Step
from headrace.errors import InvalidRequest
from headrace_workers.environments.answers import FORMAT_ERROR, last_boxed
from headrace_workers.environments.call_order import out_of_order_error

MAX_ANSWER_LENGTH = 200
"""Longer answers are wrong without being parsed: no expression here needs one, and parsing one would take time."""

_FRAC = re.compile(r"([+-]?)\\[dt]?frac\{\s*([+-]?[0-9]+)\s*\}\{\s*([+-]?[0-9]+)\s*\}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:/[0-9]+|\.[0-9]*)?|\.[0-9]+)")


def read_number(text: str) -> Fraction | None:
    """Parse the exact value of a whole number, a fraction ``a/b``, a decimal, or LaTeX ``\\frac{a}{b}``; return None
    for other texts."""
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = text.replace(" ", "").replace("−", "-")
    frac = _FRAC.fullmatch(text)
    if frac:
        sign, above, below = frac.groups()
        return None if int(below) == 0 else Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)
    if not _NUMBER.fullmatch(text):
        return None
    above, slash, below = text.partition("/")
    if slash:
        return None if int(below) == 0 else Fraction(int(above), int(below))
    return Fraction(text)


class Arithmetic:
    """``terms`` whole numbers from 0 to ``max_operand`` (divisors from 1), joined by ``operations`` left to right."""

    blocking: ClassVar[bool] = False

    def __init__(self, terms: int = 2, max_operand: int = 99, operations: str = "+-*") -> None:
        if terms < 2 or max_operand < 1:
            raise InvalidRequest(
                f"terms={terms}, max_operand={max_operand} cannot make an expression.",
                hint="Choose terms >= 2, max_operand >= 1.",
            )
        if not operations or set(operations) - set("+-*/"):
            raise InvalidRequest(f"operations={operations!r} may contain only + - * /.")
        self._terms = terms
        self._max_operand = max_operand
        self._operations = operations
        self._running = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw an expression and ask for its value."""
        expression, self._value = self._draw(random.Random(seed))
        self._running = True
        question = (
            f"What is {expression}? Answer exactly, as a whole number, a fraction such as 3/4, or a decimal, "
            "in the form \\boxed{answer}."
        )
        return question, {"expression": expression}

    def step(self, action: str) -> Step:
        """Grade the answer; the episode ends."""
        if not self._running:
            raise out_of_order_error(self)
        self._running = False
        answer = last_boxed(action)
        if answer is None:
            return self._end("No answer in the form \\boxed{answer} was found.", "format_error", FORMAT_ERROR)
        if read_number(answer) == self._value:
            return self._end("Right.", "right", 1.0)
        return self._end(f"Wrong: the value is {self._value}.", "wrong", 0.0)

    def _draw(self, rng: random.Random) -> tuple[str, Fraction]:
        first = rng.randint(0, self._max_operand)
        text, value = str(first), Fraction(first)
        for position in range(1, self._terms):
            operation = rng.choice(self._operations)
            operand = rng.randint(1 if operation == "/" else 0, self._max_operand)
            left = f"({text})" if position > 1 else text
            text = f"{left} {operation} {operand}"
            value = _apply(value, operation, operand)
        return text, value

    def _end(self, observation: str, outcome: str, reward: float) -> Step:
        info = {"outcome": outcome, "answer": str(self._value), "reward_parts": {outcome: reward}}
        return Step(observation, reward, True, False, info)


def _apply(left: Fraction, operation: str, right: int) -> Fraction:
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right

"""The situations of the tiny policy, and the parser of prompts.

* A prompt is parsed as text with one character per token id, without a tokenizer.
* Only the environment's messages are used; the same hints give the same situation.
* Situations of different kinds are never equal, whatever their numbers.
* Every prompt has a situation; an unrecognized one has ``UNKNOWN``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest
from headrace_workers.renderers.bytes_renderer import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Guess:
    """The secret is in ``[low, high]``."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Heaps:
    """A position of Nim."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of two digits."""

    left: int
    right: int


@dataclass(frozen=True, slots=True)
class OtherArithmetic:
    """An expression without its own row of weights."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A prompt that the policy does not recognize."""


Situation = Guess | Heaps | Sum | OtherArithmetic | Unknown

UNKNOWN = Unknown()

_BEYOND_VOCABULARY = re.compile(f"[^\0-{chr(VOCAB_SIZE - 1)}]")
_RANGE = re.compile(r"secret whole number from (\d+) to (\d+)")
_HINT = re.compile(r"secret number is (higher|lower) than (\d+)")
_HEAPS = "Heaps now: "
_SIZES = re.compile(r"\d+(?:, \d+)*")
_EXPRESSION = re.compile(r"What is ([^?]+)\? Answer exactly")
_DIGIT_SUM = re.compile(r"(\d) \+ (\d)")


def prompt_text(prompt: Sequence[int] | npt.NDArray[np.int32]) -> str:
    """Decode the prompt to text, one character for each id. Raises InvalidRequest for an id outside the vocabulary."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    try:
        text = array("H", prompt).tobytes().decode("utf-16-le", "surrogatepass")
    except OverflowError:
        raise _outside(next(token for token in prompt if not 0 <= token < VOCAB_SIZE)) from None
    beyond = _BEYOND_VOCABULARY.search(text)
    if beyond:
        raise _outside(ord(beyond[0]))
    return text


def read_situation(text: str) -> Situation:
    """Parse the situation that a prompt's text describes."""
    bounds = _RANGE.search(text)
    if bounds:
        return _read_guess(text, int(bounds[1]), int(bounds[2]))
    heaps = text.rfind(_HEAPS)
    if heaps >= 0 and (sizes := _SIZES.match(text, heaps + len(_HEAPS))):
        return Heaps(tuple(int(size) for size in sizes[0].split(", ")))
    expression = _EXPRESSION.search(text)
    if expression:
        digits = _DIGIT_SUM.fullmatch(expression[1])
        return Sum(int(digits[1]), int(digits[2])) if digits else OtherArithmetic()
    return UNKNOWN


def _read_guess(text: str, low: int, high: int) -> Situation:
    for direction, number in _HINT.findall(text):
        if direction == "higher":
            low = max(low, int(number) + 1)
        else:
            high = min(high, int(number) - 1)
    return Guess(low, high) if low <= high else UNKNOWN


def _outside(token: int) -> InvalidRequest:
    return InvalidRequest(f"Token id {token} is outside the vocabulary of {VOCAB_SIZE}.", token=token)

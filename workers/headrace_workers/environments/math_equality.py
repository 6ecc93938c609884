r"""Equality of mathematical expressions, by ``math-verify``.

Call this as a bounded call, never in a worker: some expressions run forever or take all memory, and the timeouts of
``math-verify`` work on a main thread only.

* An expression is the content of ``\boxed{...}``, without the box.
* Rational numbers are equal only if they are exactly equal; other expressions are compared by ``math-verify``.
* An expression that cannot be parsed or compared is equal to no other.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

from math_verify import parse, verify
from sympy import Rational

from headrace_workers.environments.arithmetic import read_number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are disabled


def is_equal(answer: str, reference: str) -> bool:
    """Return True if an answer equals the reference."""
    try:
        return _is_equal(answer, reference)
    except (MemoryError, RecursionError):
        raise  # the limits of the call
    except Exception:
        if not is_readable(reference):
            raise  # the reference is at fault
        return False


def _is_equal(answer: str, reference: str) -> bool:
    numbers = _rational(answer), _rational(reference)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(verify(_read(reference), _read(answer), timeout_seconds=None))


def is_readable(reference: str) -> bool:
    """Return True if a reference can be parsed, can be compared with a number, and equals itself."""
    read = _read(reference)
    verify(read, _read("1"), timeout_seconds=None)
    return bool(verify(read, read, timeout_seconds=None))


def _rational(expression: str) -> Fraction | None:
    """Exact value of a rational number, a decimal by its digits; None for any other expression."""
    plain = read_number(expression)
    if plain is not None:
        return plain
    read = next(iter(_read(expression)), None)
    return Fraction(int(read.p), int(read.q)) if isinstance(read, Rational) else None


def _read(expression: str) -> Any:
    return parse(f"\\boxed{{{expression}}}", parsing_timeout=None)


is_equal("1", r"\frac{3}{4}")  # builds the parser's tables before the fork, to share them among all calls

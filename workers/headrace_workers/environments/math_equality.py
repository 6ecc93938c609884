r"""Whether two mathematical expressions are the same, by ``math-verify``. To be called as a bounded call, never in a
worker: some expressions keep it busy for ever, or take all memory, and its own timeouts work on a main thread alone.

* An expression is what stands in ``\boxed{...}``, without the box.
* Rational numbers are the same only if they are exactly; for anything else the rule is that of ``math-verify``.
* An expression that cannot be read is equal to none.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

from math_verify import parse, verify
from sympy import Rational

from headrace_workers.environments.arithmetic import read_number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def same(answer: str, reference: str) -> bool:
    """Whether an answer is the reference."""
    numbers = _rational(answer), _rational(reference)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(verify(_read(reference), _read(answer), timeout_seconds=None))


def readable(reference: str) -> bool:
    """Whether a reference can be read, be compared with a number, and is the same as itself."""
    read = _read(reference)
    verify(read, _read("1"), timeout_seconds=None)
    return bool(verify(read, read, timeout_seconds=None))


def _rational(expression: str) -> Fraction | None:
    """The exact value of a rational number: a decimal is what its digits say, and near to nothing else."""
    plain = read_number(expression)
    if plain is not None:
        return plain
    read = next(iter(_read(expression)), None)
    return Fraction(int(read.p), int(read.q)) if isinstance(read, Rational) else None


def _read(expression: str) -> Any:
    return parse(f"\\boxed{{{expression}}}", parsing_timeout=None)


same("1", r"\frac{3}{4}")  # makes the parser's tables, which all calls then share

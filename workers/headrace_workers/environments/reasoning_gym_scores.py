"""Scores of answers by the datasets of ``reasoning-gym``.

Call this as a bounded call, never in a worker: some answers take forever to score.

* An answer is never evaluated as a program: lists are read as literals, and expressions may contain only numbers,
  operators and the names of variables and functions. Left alone, some datasets pass the answer to Python's ``eval``.
* An answer on which a grader raises has no score; if its own answer makes it raise, the grader is broken.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

from headrace_workers.environments.reasoning_gym import draw_task, import_package, isolated_generators

import_package()  # before the fork, to share it among all calls

MAX_LITERAL = 10_000
"""Limit on characters of a list in an answer: nested brackets would overflow the stack of Python's parser."""

EXPRESSION_DATASETS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Datasets that parse the answer by sympy, which evaluates it."""

LITERAL_DATASETS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Datasets that evaluate the answer to read a list."""

FUNCTIONS = frozenset(
    (
        *("Abs", "Rational", "abs", "exp", "ln", "log", "pi", "sqrt", "erf"),
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    )
)
"""Names that an expression may contain, besides variables of one letter."""

UNREADABLE = ")"
"""An expression that no dataset can parse, in the place of one that must not be evaluated."""

_TOKENS = re.compile(r"\s+|[A-Za-z]+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\*\*|[-+*/^(),=]")


def score(dataset_name: str, config: dict[str, Any], seed: int, answer: str) -> float | str | None:
    """Score an answer to the task of a seed. Returns None if it cannot be read, or the error with which the grader
    fails on its own answer."""
    dataset, entry = draw_task(dataset_name, config, seed)
    if dataset_name in EXPRESSION_DATASETS and not is_expression(answer):
        answer = UNREADABLE
    if dataset_name in LITERAL_DATASETS:
        vars(sys.modules[type(dataset).__module__])["eval"] = _literal
    with isolated_generators(0):
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - a grader raises whatever parsing the answer raises
            return _own_error(dataset, entry)


def is_expression(text: str) -> bool:
    """Return True if a text consists of numbers, operators, variables and known functions."""
    position = 0
    while position < len(text):
        token = _TOKENS.match(text, position)
        if token is None or (token.group().isalpha() and len(token.group()) > 1 and token.group() not in FUNCTIONS):
            return False
        position = token.end()
    return True


def _literal(text: str) -> Any:
    """Read a literal, in the place of ``eval``."""
    if len(text) > MAX_LITERAL:
        raise ValueError("the text is too long")
    return ast.literal_eval(text.strip())


def _own_error(dataset: Any, entry: dict[str, Any]) -> str | None:
    try:
        dataset.score_answer(entry["answer"], entry)
    except Exception as error:  # noqa: BLE001 - reported to the environment
        return repr(error)
    return None

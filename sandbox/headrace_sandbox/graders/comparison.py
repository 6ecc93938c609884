"""Comparison of actual and expected output, outside the sandbox.

* Numbers are equal within ``CLOSE`` where one of them is a float, else exactly; a bool is only equal to a bool.
* A tuple equals a list. A set equals a list in any order. Keys of a mapping are compared in their JSON form.
* Output that cannot be read as an answer equals nothing.
* The time to read and compare an answer depends only on its size, never on its content: at most ``MOST_NEAR`` items of
  a set may be close to expected ones without being equal.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

CLOSE = 1e-9
"""Relative and absolute tolerance: covers the order of additions in a sum, but no wrong answer."""

MOST_NEAR = 500
"""The largest number of items of a set that are compared pairwise."""


class UnreadableAnswer(Exception):
    """The answer does not have the form that ``function_call.py`` writes."""


class SetAnswer(NamedTuple):
    """A set in an answer."""

    items: list[Any]


class MappingAnswer(NamedTuple):
    """A mapping in an answer."""

    items: list[tuple[Any, Any]]


def same_text(output: str, expected: str) -> bool:
    """True if the output is the expected one, ignoring surrounding whitespace."""
    return output.strip() == expected.strip()


def read_answer(answer: bytes) -> Any:
    """The value in an answer. Raises UnreadableAnswer."""
    try:
        return _value(json.loads(answer))
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableAnswer(f"{type(error).__name__}: {error}") from error


def same_value(actual: Any, expected: Any) -> bool:
    """True if a value equals the expected one, which may contain JSON values, tuples, sets and bytes."""
    try:
        return _same(actual, expected)
    except RecursionError:
        return False


def _value(node: Any) -> Any:
    if isinstance(node, list):
        return [_value(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    match tag:
        case "int":
            return int(content, 16)
        case "bytes":
            return bytes.fromhex(content)
        case "set":
            return SetAnswer([_value(item) for item in content])
        case "map":
            return MappingAnswer([(_value(key), _value(item)) for key, item in content])
    raise ValueError(f"{tag!r} is not a kind of value")


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(actual, bool):
        return actual is expected
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return _same_number(actual, expected)
    if isinstance(actual, SetAnswer):
        return isinstance(expected, list | tuple | set | frozenset) and _same_set(actual.items, list(expected))
    if isinstance(actual, MappingAnswer):
        return isinstance(expected, dict) and _same_map(actual.items, expected)
    if isinstance(expected, list | tuple):
        return isinstance(actual, list) and len(actual) == len(expected) and all(map(_same, actual, expected))
    return type(actual) is type(expected) and bool(actual == expected)


def _same_number(actual: float, expected: float) -> bool:
    if isinstance(actual, int) and isinstance(expected, int):
        return actual == expected
    try:
        return math.isclose(actual, expected, rel_tol=CLOSE, abs_tol=CLOSE) or actual == expected
    except OverflowError:
        return False


def _same_set(actual: list[Any], expected: list[Any]) -> bool:
    if len(actual) != len(expected):
        return False
    alike: dict[Any, list[Any]] = {}
    for item in expected:
        alike.setdefault(_exact(item), []).append(item)
    others = []
    for item in actual:
        equal = alike.get(_exact(item))
        if equal:
            equal.pop()
        else:
            others.append(item)
    if len(others) > MOST_NEAR:
        return False
    remaining = [item for equal in alike.values() for item in equal]
    for item in others:
        match_position = next((position for position, other in enumerate(remaining) if _same(item, other)), None)
        if match_position is None:
            return False
        del remaining[match_position]
    return True


def _exact(value: Any) -> Any:
    """A lookup key that equal values share; a unique object for a value that has no such key."""
    if isinstance(value, list | tuple):
        return (list, *map(_exact, value))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return (bool if isinstance(value, bool) else None, value)
    return object()


def _same_map(actual: list[tuple[Any, Any]], expected: dict[Any, Any]) -> bool:
    if len(actual) != len(expected):
        return False
    expected_items = {_key(key): item for key, item in expected.items()}
    actual_items = {_key(key): item for key, item in actual}
    return actual_items.keys() == expected_items.keys() and all(
        _same(item, expected_items[key]) for key, item in actual_items.items()
    )


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=repr)

"""The tests of a row, as data sets of programming problems write them.

* ``{"inputs": [...], "outputs": [...]}``: programs that read and write; with ``fn_name`` calls of that function.
* A list of ``{"input": ..., "output": ...}``, each with ``fn_name`` where it is a call.
* Either may itself be JSON in a string. Inputs of a call are its arguments: a list; or a text with one JSON value a
  line, and then the output is JSON as well.
* Of many tests those with the longest inputs are taken, as GEM does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_sandbox.graders import CallCase, Case, StdioCase
from headrace_workers.environments.rows import bad_row


def tests_of(row: dict[str, Any], most: int) -> list[Case]:
    """The tests of a row, at most so many. Raises EnvironmentFailure ``bad-row``."""
    try:
        pairs = _pairs(_plain(row["tests"]))
        chosen = sorted(range(len(pairs)), key=lambda number: -_length(pairs[number][0]))[:most]
        cases = [_case(*pairs[number]) for number in sorted(chosen)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise bad_row(f"The tests of the row cannot be read: {type(error).__name__}: {error}.") from error
    if not cases:
        raise bad_row("The row has no tests.")
    return cases


def _plain(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


def _pairs(tests: Any) -> list[tuple[Any, Any, str]]:
    """Input, output and function (empty: a program) of each test."""
    if isinstance(tests, dict):
        function = tests.get("fn_name") or ""
        return [(*pair, function) for pair in zip(tests["inputs"], tests["outputs"], strict=True)]
    return [(test["input"], test["output"], test.get("fn_name") or "") for test in tests]


def _case(given: Any, expected: Any, function: str) -> Case:
    if not function:
        return StdioCase(stdin=_text(given), stdout=_text(expected))
    if isinstance(given, str):
        given, expected = [msgspec.json.decode(line) for line in given.splitlines() if line.strip()], _plain(expected)
    if not isinstance(given, list):
        raise TypeError(f"the arguments of {function} are {type(given).__name__}, not a list")
    return CallCase(function=function, arguments=given, expected=expected)


def _text(value: Any) -> str:
    """Text, or lines of text."""
    return value if isinstance(value, str) else "\n".join(str(line) for line in value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))

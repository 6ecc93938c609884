"""Test cases of a row, in the formats of common programming data sets.

* ``{"inputs": [...], "outputs": [...]}``: programs with stdin and stdout; with ``fn_name``, calls of that function.
* A list of ``{"input": ..., "output": ...}``, each with ``fn_name`` if it is a call.
* Either may itself be JSON in a string. The input of a call is its list of arguments, or a text with one JSON value
  per line; the output is then JSON too.
* If there are too many tests, those with the longest inputs are used, as in GEM.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_sandbox.graders import CallCase, Case, StdioCase
from headrace_workers.environments.rows import bad_row_error


def read_cases(row: dict[str, Any], max_cases: int) -> list[Case]:
    """Read the tests of a row, at most ``max_cases``. Raises EnvironmentFailure ``bad-row``."""
    try:
        pairs = _pairs(_decode(row["tests"]))
        longest = sorted(range(len(pairs)), key=lambda number: -_length(pairs[number][0]))[:max_cases]
        cases = [_case(*pairs[number]) for number in sorted(longest)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise bad_row_error(f"The tests of the row cannot be read: {type(error).__name__}: {error}.") from error
    if not cases:
        raise bad_row_error("The row has no tests.")
    return cases


def _decode(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


def _pairs(tests: Any) -> list[tuple[Any, Any, str]]:
    """Input, output and function of each test. The function is empty for a program."""
    if isinstance(tests, dict):
        function = tests.get("fn_name") or ""
        return [(*pair, function) for pair in zip(tests["inputs"], tests["outputs"], strict=True)]
    return [(test["input"], test["output"], test.get("fn_name") or "") for test in tests]


def _case(argument: Any, expected: Any, function: str) -> Case:
    if not function:
        return StdioCase(stdin=_text(argument), stdout=_text(expected))
    if isinstance(argument, str):
        argument, expected = (
            [msgspec.json.decode(line) for line in argument.splitlines() if line.strip()],
            _decode(expected),
        )
    if not isinstance(argument, list):
        raise TypeError(f"the arguments of {function} are {type(argument).__name__}, not a list")
    return CallCase(function=function, arguments=argument, expected=expected)


def _text(value: Any) -> str:
    """Join a list of lines; return a text unchanged."""
    return value if isinstance(value, str) else "\n".join(str(line) for line in value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))

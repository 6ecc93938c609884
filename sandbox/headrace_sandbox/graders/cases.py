"""Test cases: input, expected output and result.

* A case has an input and an expected output. Only the input ever reaches a sandbox.
* Values are data: JSON values, tuples, sets, bytes and integers of any size.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace_sandbox.result import LimitName

Verdict = Literal["passed", "wrong", "error", "limit"]
"""``passed``; ``wrong``: succeeded, with unexpected output; ``error``: failed, or gave no answer; ``limit``: ran into a
limit."""


class StdioCase(msgspec.Struct, frozen=True, kw_only=True, tag="stdio"):
    """The submission is a program that reads ``stdin``, and should print ``stdout`` and nothing else; surrounding
    whitespace is ignored."""

    stdin: str = ""
    stdout: str


class CallCase(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """The submission defines ``function`` (``f``, or ``Solution.f`` of a class that is made without arguments), which
    is called once and should return ``expected``. Its output is ignored."""

    function: str
    arguments: list[Any] = []
    expected: Any


Case = StdioCase | CallCase


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one case. ``limit``: the limit that it ran into. ``detail``: the reason that it did not pass, for
    people; after an error, the end of its standard error. ``wall_s``: the time of the program alone."""

    verdict: Verdict
    limit: LimitName | None = None
    detail: str = ""
    wall_s: float = 0.0

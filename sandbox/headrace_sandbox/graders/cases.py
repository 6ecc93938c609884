"""What a submission is asked, what it should give, and what came of it.

* A case has what goes in, and what should come out. Only the first ever reaches a sandbox.
* Values are data: what JSON has, and tuples, sets, bytes and integers of any size.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace_sandbox.result import LimitName

Verdict = Literal["passed", "wrong", "error", "limit"]
"""Passed; ended well with another output than the expected one; failed, or gave no answer; ran into a limit."""


class StdioCase(msgspec.Struct, frozen=True, kw_only=True, tag="stdio"):
    """The submission is a program: ``stdin`` goes in, and its whole standard output should be ``stdout``, spaces and
    line ends around it aside."""

    stdin: str = ""
    stdout: str


class CallCase(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """The submission defines ``function`` (``f``, or ``Solution.f`` of a class that is made without arguments), which
    is called once and should return ``expected``. What it prints is ignored."""

    function: str
    arguments: list[Any] = []
    expected: Any


Case = StdioCase | CallCase


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one case. ``limit``: the one that it ran into. ``detail``: why it did not pass, for people; the end
    of its standard error after an error. ``wall_s``: of the program itself."""

    verdict: Verdict
    limit: LimitName | None = None
    detail: str = ""
    wall_s: float = 0.0

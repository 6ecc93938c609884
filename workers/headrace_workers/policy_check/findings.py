"""What a check finds, and how checks are run one after another.

* Each check ends as PASS with what it saw, as FAIL with what to do about it, or as SKIPPED with the reason.
* What a check does not foresee (the connection breaks, an answer is no JSON) is its failure, never the program's.
* After a check that all others need has failed, the others are skipped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

Status = Literal["PASS", "FAIL", "SKIPPED"]

S = TypeVar("S")


class Finding(NamedTuple):
    """``detail``: what was seen. ``remedy``: what to do, if anything."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


class Check(NamedTuple):
    """``run`` gives what it saw, or raises Failed or Skipped. ``vital``: without it no other makes sense."""

    name: str
    run: Callable[..., Awaitable[str]]
    vital: bool = False


class Failed(Exception):
    """The check fails."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy


class Skipped(Exception):
    """The check cannot be made here, for this reason."""


async def run_checks(checks: Sequence[Check], subject: S) -> AsyncIterator[Finding]:
    """The findings about ``subject``, each as soon as it is there."""
    lost = ""
    for check in checks:
        if lost:
            yield Finding(check.name, "SKIPPED", f"it needs the check {lost!r}")
            continue
        finding = await _found(check, subject)
        if check.vital and finding.status == "FAIL":
            lost = check.name
        yield finding


async def _found(check: Check, subject: S) -> Finding:
    try:
        return Finding(check.name, "PASS", await check.run(subject))
    except Skipped as skipped:
        return Finding(check.name, "SKIPPED", str(skipped))
    except Failed as failed:
        return Finding(check.name, "FAIL", failed.detail, failed.remedy)

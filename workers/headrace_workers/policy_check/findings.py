"""Findings of checks, and the function that runs the checks in order.

* Each check ends as PASS with its observation, as FAIL with a remedy, or as SKIPPED with the reason.
* An unforeseen error (a broken connection, an answer that is not JSON) fails the check, never the program.
* If a vital check fails, all later ones are skipped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from headrace.errors import EpisodeFailure

CheckStatus = Literal["PASS", "FAIL", "SKIPPED"]

S = TypeVar("S")


class CheckFinding(NamedTuple):
    """The result of a check. ``detail``: the observation. ``remedy``: the action to take, if any."""

    check: str
    status: CheckStatus
    detail: str
    remedy: str = ""


class PolicyCheck(NamedTuple):
    """A check. ``run`` returns its observation, or raises CheckFailed or CheckSkipped. ``vital``: others need it."""

    name: str
    run: Callable[..., Awaitable[str]]
    vital: bool = False


class CheckFailed(Exception):
    """Raised by a check that fails, with the observation and the remedy."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy


class CheckSkipped(Exception):
    """Raised by a check that cannot run, with the reason."""


async def run_checks(checks: Sequence[PolicyCheck], subject: S) -> AsyncIterator[CheckFinding]:
    """Run the checks on ``subject``, and yield each finding at once."""
    failed = ""
    for check in checks:
        if failed:
            yield CheckFinding(check.name, "SKIPPED", f"it needs the check {failed!r}")
            continue
        finding = await _run_check(check, subject)
        if check.vital and finding.status == "FAIL":
            failed = check.name
        yield finding


async def _run_check(check: PolicyCheck, subject: S) -> CheckFinding:
    try:
        return CheckFinding(check.name, "PASS", await check.run(subject))
    except CheckSkipped as skipped:
        return CheckFinding(check.name, "SKIPPED", str(skipped))
    except CheckFailed as failed:
        return CheckFinding(check.name, "FAIL", failed.detail, failed.remedy)
    except EpisodeFailure as failure:  # the renderer refuses a conversation of the check
        return CheckFinding(check.name, "FAIL", f"{failure.kind}: {failure.detail}", failure.hint)

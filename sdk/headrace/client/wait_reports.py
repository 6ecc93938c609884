"""Reports of the reasons why a pull waits: while it waits, and in the error when its timeout passes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from headrace.errors import NothingToServe
from headrace.wire import messages

log = logging.getLogger("headrace.client.sync_client")

WaitCallback = Callable[[str, list[messages.Reason]], None]
"""Called while a pull waits, with the run and the reasons why no batch can be served."""


def timeout_error(run: str, timeout_s: float, reasons: list[messages.Reason]) -> NothingToServe:
    """The error of a pull whose timeout passed."""
    return NothingToServe(
        f"Run {run!r} had no batch ready within {timeout_s:g} s. {reasons_text(reasons)}",
        run=run,
        reasons=msgspec.to_builtins(reasons),
    )


def report_wait(on_wait: WaitCallback | None, run: str, reasons: list[messages.Reason]) -> None:
    """Call the callback, or log the reasons where the caller gave none."""
    if on_wait is not None:
        on_wait(run, reasons)
        return
    # A warning is shown even where logging is not configured. A loop that waits silently looks hung.
    log.warning("Run %r has no batch yet. %s", run, reasons_text(reasons))


def reasons_text(reasons: list[messages.Reason]) -> str:
    """The reasons as sentences."""
    return " ".join(_sentence(reason.message) for reason in reasons) or "No reason was given."


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."

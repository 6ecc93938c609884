"""Logger of the worker. It adds run, episode and attempt to a line where they are known."""

from __future__ import annotations

from typing import Any

from structlog.typing import FilteringBoundLogger

from headrace.server import logs
from headrace.wire.messages import Assignment


def logger(assignment: Assignment | None = None, **fields: Any) -> FilteringBoundLogger:
    """Make a logger that adds ``fields``, and the assignment's run, episode and attempt, to every line."""
    log = logs.logger("headrace.worker")
    if assignment is not None:
        fields |= {"run": assignment.run, "episode": assignment.episode, "attempt": assignment.attempt}
    return log.bind(**fields)

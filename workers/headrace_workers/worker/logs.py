"""The worker's logger, which puts run, episode and attempt on every line where they are known."""

from __future__ import annotations

from typing import Any

from structlog.typing import FilteringBoundLogger

from headrace.server import logs
from headrace.wire.messages import Assignment


def logger(assignment: Assignment | None = None, **fields: Any) -> FilteringBoundLogger:
    """A logger that puts run, episode and attempt of an assignment on every line."""
    log = logs.logger("headrace.worker")
    if assignment is not None:
        fields |= {"run": assignment.run, "episode": assignment.episode, "attempt": assignment.attempt}
    return log.bind(**fields)

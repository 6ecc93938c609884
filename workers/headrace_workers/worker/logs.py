"""Structured logs of the worker: JSON lines on standard error, with run, episode and attempt where they are known."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

from headrace.wire.messages import Assignment


def configure_logs(level: str, stream: TextIO | None = None) -> None:
    """Send all log lines of this process to ``stream`` (default: standard error) as JSON."""
    out = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.dict_tracebacks,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        cache_logger_on_first_use=True,
    )


def logger(assignment: Assignment | None = None, **facts: Any) -> Any:
    """A logger that puts run, episode and attempt of an assignment on every line."""
    log = structlog.get_logger("headrace.worker")
    if assignment is not None:
        facts |= {"run": assignment.run, "episode": assignment.episode, "attempt": assignment.attempt}
    return log.bind(**facts)

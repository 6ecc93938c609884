"""Structured logs of a process: JSON lines for machines, readable lines on a terminal.

* Lines of libraries (uvicorn, asyncio) have the same form.
* Tracebacks show no values of variables, since one of them may be a token.
* Requests are counted in metrics, not logged one by one.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LogFormat = Literal["auto", "json", "text"]
"""``auto``: readable on a terminal, JSON lines elsewhere."""


def configure(level: str, form: LogFormat = "json", stream: TextIO | None = None) -> None:
    """Write the log lines of this process at ``level`` or above to ``stream`` (default: standard error)."""
    out = stream or sys.stderr
    readable = form == "text" or (form == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_text(out) if readable else _json()),
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
    for name in ("uvicorn.access", "aiohttp.access"):
        logging.getLogger(name).disabled = True


def _text(out: TextIO) -> list[Processor]:
    return [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]


def logger(name: str) -> FilteringBoundLogger:
    """A logger of that name. Bind ``run=``, ``episode=`` and ``attempt=`` to it where they are known."""
    bound: FilteringBoundLogger = structlog.get_logger(name)
    return bound

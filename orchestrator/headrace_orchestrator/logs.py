"""Structured logs: JSON lines for machines, readable lines on a terminal.

* Run, episode and attempt are on every line of code that knows them.
* Lines of libraries (uvicorn, asyncio) come out in the same form.
* Tracebacks show no values of variables: a token may be among them.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

from headrace_orchestrator.settings import Settings


def configure(settings: Settings, stream: TextIO | None = None) -> None:
    """Send all logs of this process to ``stream`` (default: standard error)."""
    out = stream or sys.stderr
    readable = settings.log_format == "text" or (settings.log_format == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[structlog.typing.Processor]
    if readable:
        traceback = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=traceback)]
    else:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # locals may hold tokens
        render = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    for name in ("uvicorn.access", "aiohttp.access"):
        logging.getLogger(name).disabled = True  # requests are counted in metrics, not logged one by one


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; bind ``run=``, ``episode=``, ``attempt=`` where known."""
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound

"""Structured logs of a process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest
import structlog

from headrace.server import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    for name in ("uvicorn.access", "aiohttp.access"):
        logging.getLogger(name).disabled = False


@pytest.fixture
def stream() -> StringIO:
    return StringIO()


def test_lines_are_json_with_the_fields_bound_to_the_logger(stream: StringIO):
    logs.configure("info", stream=stream)
    logs.logger("test").bind(run="r", episode="e", attempt=2).warning("episode failed", kind="slow")
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "episode failed",
        "level": "warning",
        "logger": "test",
        "run": "r",
        "episode": "e",
        "attempt": 2,
        "kind": "slow",
    }


def test_lines_are_readable_on_a_terminal(stream: StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "isatty", lambda: True)
    logs.configure("info", "auto", stream)
    logs.logger("test").warning("episode failed", run="r")
    assert "episode failed" in stream.getvalue()
    assert "{" not in stream.getvalue()


def test_lines_below_the_level_are_dropped(stream: StringIO):
    logs.configure("warning", stream=stream)
    logs.logger("test").info("started")
    logging.getLogger("library").info("started")
    assert not stream.getvalue()


@pytest.mark.parametrize("form", ["json", "text"])
def test_tracebacks_show_no_values_of_variables(stream: StringIO, form: logs.LogFormat):
    logs.configure("info", form, stream)
    secret = "a token that must stay secret"
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logs.logger("test").exception("unexpected")
    assert "broken" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_lines_of_libraries_have_the_same_form(stream: StringIO):
    logs.configure("info", stream=stream)
    logging.getLogger("library").warning("from %s", "a library")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["logger"]) == ("from a library", "warning", "library")


def test_requests_are_counted_in_metrics_and_not_logged_one_by_one(stream: StringIO):
    logs.configure("info", stream=stream)
    logging.getLogger("uvicorn.access").info("GET /")
    assert not stream.getvalue()

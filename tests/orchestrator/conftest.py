"""Fixtures of the orchestrator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace_orchestrator.buffer.log.writer_process import SUPPORTED, LogWriterProcess
from headrace_orchestrator.service.lifecycle import StartLogWriter, start_log_writer_thread
from tests.orchestrator.serving import Api, Process, orchestrator

_WRITERS = [
    pytest.param(start_log_writer_thread, id="thread"),
    pytest.param(
        LogWriterProcess,
        id="process",
        marks=pytest.mark.skipif(not SUPPORTED, reason="the log's writer has no process of its own here"),
    ),
]


@pytest.fixture(params=_WRITERS)
def start_log_writer(request: pytest.FixtureRequest) -> StartLogWriter:
    """Starts a log writer, in a thread or in a process: the test runs with each."""
    start: StartLogWriter = request.param
    return start


@pytest.fixture
def log_dir(data_dir: Path) -> Path:
    """The log's folder in a data directory that does not exist yet."""
    return data_dir / "log"


@pytest.fixture
async def api(data_dir: Path) -> AsyncIterator[Api]:
    """A fresh orchestrator with default settings."""
    async with orchestrator(data_dir) as found:
        yield found


@pytest.fixture
def process(data_dir: Path) -> Iterator[Process]:
    """An orchestrator process on a data directory of its own; start it when wanted."""
    found = Process(data_dir)
    yield found
    found.end()

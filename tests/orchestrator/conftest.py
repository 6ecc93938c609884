"""Fixtures of the orchestrator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.orchestrator.serving import Api, Process, orchestrator


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

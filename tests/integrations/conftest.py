from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.stub import Stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A scripted orchestrator."""
    with Stub() as running:
        yield running

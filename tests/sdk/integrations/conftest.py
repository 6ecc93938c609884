from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdk.client.stub_server import Stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A scripted orchestrator."""
    with Stub() as running:
        yield running

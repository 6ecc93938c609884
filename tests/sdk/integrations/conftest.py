from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdk.client.stub_server import StubServer


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A scripted orchestrator."""
    with StubServer() as running:
        yield running

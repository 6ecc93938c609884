"""A harness whose history is replayed at the end of every test: the durable state must be the same."""

from __future__ import annotations

import pytest

from tests.orchestrator.scheduler.harness import Harness


@pytest.fixture
def harness():
    harness = Harness()
    yield harness
    assert harness.replayed().durable() == harness.core.durable()

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Version
from headrace.wire import codec
from tests import builders
from tests.sdk.client.both_clients import CLIENTS, Connect
from tests.sdk.client.stub_server import StubServer


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as running:
        yield running


@pytest.fixture(scope="session")
def body() -> bytes:
    """A batch of two groups of one trajectory each, of version 0.3 of the run ``guess``."""
    return make_body("batch-1")


def make_body(name: str, *, estimator: EstimatorSpec = EstimatorSpec()) -> bytes:  # noqa: B008 - it is frozen
    groups, records = [], []
    for number in (1, 2):
        trajectory = builders.make_trajectory(number=number)
        record = codec.encode(trajectory)
        groups.append(GroupInput(f"g{number}", trajectory.task, 1, [(codec.decode_head(record), len(record))]))
        records.append(record)
    head = build_head(batch=name, run="guess", estimator=estimator, version=Version(0, 3), groups=groups)
    return head + b"".join(records)


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, stub: StubServer) -> Connect:
    """Creates a client of the stub server, with short waits because the stub responds at once."""
    kind = request.param

    def make(**options: Any) -> Any:
        return kind(stub.url, **{"retry_for_s": 5.0, "keepalive": False, **options})

    return make

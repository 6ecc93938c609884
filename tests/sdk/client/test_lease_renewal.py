"""Renewal of the leases of held batches, by both clients."""

from __future__ import annotations

from headrace.client.sync_client import Client
from headrace.errors import UnknownRun
from tests.sdk.client.both_clients import BlockingAsyncClient
from tests.sdk.client.routes import DOING, PULL
from tests.sdk.client.stub_server import NO_RESPONSE, StubServer, batch, ok, problem


def test_while_batches_are_held_their_leases_are_renewed(stub: StubServer, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, ok({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        requests = stub.wait_for(DOING, 3)
    assert {request.json["doing"] for request in requests} == {"training"}


def test_the_async_client_renews_in_its_event_loop(stub: StubServer, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, NO_RESPONSE, ok({"epoch": 1}))
    with BlockingAsyncClient(stub.url) as client:
        client.pull("guess")
        client.pass_time_until(lambda: len(stub.requests_to(DOING)) >= 3)


def test_a_failed_renewal_is_repeated_and_reports_the_last_activity(stub: StubServer, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, ok({"epoch": 1}), NO_RESPONSE, problem(UnknownRun("Gone.")), ok({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        client.doing("guess", "checkpointing")
        requests = stub.wait_for(DOING, 5)
    assert requests[-1].json["doing"] == "checkpointing"


def test_without_keepalive_nothing_is_renewed(stub: StubServer, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.001))
    stub.on("GET /v1/runs", ok([]))
    with Client(stub.url, keepalive=False) as client:
        client.pull("guess")
        client.runs()
    assert stub.requests_to(DOING) == []

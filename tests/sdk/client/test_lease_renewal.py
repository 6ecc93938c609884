"""Renewal of the leases of held batches, by both clients."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize("connect", [Client, BlockingAsyncClient])
def test_closing_a_client_that_pulled_says_goodbye_once(stub: StubServer, body: bytes, connect: Any) -> None:
    stub.on(PULL, batch(body))
    stub.on(DOING, ok({"epoch": 1}))
    with connect(stub.url) as client:
        client.pull("guess")
    assert [request.json["doing"] for request in stub.requests_to(DOING)] == ["gone"]
    with connect(stub.url):
        pass  # it never pulled
    assert len(stub.requests_to(DOING)) == 1


@pytest.mark.parametrize("answer", [NO_RESPONSE, problem(UnknownRun("Gone."))])
def test_a_goodbye_that_fails_is_no_error(stub: StubServer, body: bytes, answer: Any) -> None:
    stub.on(PULL, batch(body))
    stub.on(DOING, answer)
    with Client(stub.url, retry_for_s=60) as client:
        client.pull("guess")
    assert len(stub.requests_to(DOING)) == 1


def test_a_learner_promises_heartbeats_and_sends_them(
    stub: StubServer, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.leases.HEARTBEAT_S", 0.01)
    stub.on(DOING, ok({"epoch": 1}))
    stub.on(PULL, batch(body, lease_s=300.0))
    with Client(stub.url) as client:
        client.pull("guess")
        requests = stub.wait_for(DOING, 3)
    assert {(request.json["renewal"], request.json["heartbeat_s"]) for request in requests[:3]} == {(True, 10.0)}
    assert {request.json["doing"] for request in requests[:3]} <= {"idle", "training"}
    assert stub.requests_to(PULL)[0].json["heartbeat_s"] == 10.0

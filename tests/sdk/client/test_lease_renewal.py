"""Leases of held batches are renewed, by both clients."""

from __future__ import annotations

from headrace.client.sync_client import Client
from headrace.errors import (
    UnknownRun,
)
from tests.sdk.client.both_clients import Driven
from tests.sdk.client.routes import DOING, PULL
from tests.sdk.client.stub_server import LOST, Stub, batch, good, problem


def test_while_batches_are_held_their_leases_are_renewed(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, good({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        asked = stub.wait_for(DOING, 3)
    assert {seen.json["doing"] for seen in asked} == {"training"}


def test_the_async_client_renews_in_its_event_loop(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, LOST, good({"epoch": 1}))
    with Driven(stub.url) as client:
        client.pull("guess")
        client.pass_time_until(lambda: len(stub.asked(DOING)) >= 3)


def test_a_renewal_that_fails_is_tried_again_and_repeats_what_the_learner_said(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, good({"epoch": 1}), LOST, problem(UnknownRun("Gone.")), good({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        client.doing("guess", "checkpointing")
        asked = stub.wait_for(DOING, 5)
    assert asked[-1].json["doing"] == "checkpointing"


def test_without_keepalive_nothing_is_renewed(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.001))
    stub.on("GET /v1/runs", good([]))
    with Client(stub.url, keepalive=False) as client:
        client.pull("guess")
        client.runs()
    assert stub.asked(DOING) == []

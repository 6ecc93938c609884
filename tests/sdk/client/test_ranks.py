"""Ranks of a data-parallel learner, and a restarted learner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from headrace.batch.body import read_head
from headrace.batch.shards import ShardedBatch
from headrace.errors import BatchSuperseded, InvalidRequest, NothingToServe
from headrace.wire import messages
from tests.sdk.client.both_clients import CLIENTS
from tests.sdk.client.conftest import make_body
from tests.sdk.client.stub_server import StubServer, batch, ok, problem

PULL = "POST /v1/runs/guess/pull"
Connect = Callable[..., AbstractContextManager[Any]]

WAITING = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="collecting", message="2 of 4 ready")])


@pytest.fixture(params=CLIENTS)
def connect(request: pytest.FixtureRequest, stub: StubServer) -> Connect:
    return lambda **options: request.param(stub.url, **{"keepalive": False, "session": "start-1", **options})


def shard_of(name: str, number: int, shards: int) -> bytes:
    body = make_body(name)
    head = read_head(body)
    shard = ShardedBatch(head, shards).shard(number)
    offsets = head.columns["record_offsets"] + head.records_start
    return shard.head + b"".join(body[offsets[n] : offsets[n + 1]] for n in shard.records)


def names(stub: StubServer) -> list[str]:
    return [request.json["request"] for request in stub.requests_to(PULL)]


def test_the_kth_pull_of_every_rank_has_the_same_request_id(stub: StubServer, connect: Connect) -> None:
    for rank in range(2):
        stub.on(PULL, *(batch(shard_of(f"b{k}", rank, 2)) for k in (0, 1)))
        with connect() as client:
            for k in (0, 1):
                pulled = client.pull("guess", shard=rank, shards=2)
                assert (pulled.id, pulled.shard.number, len(pulled.shard.parts)) == (f"b{k}", rank, 2)
        stub._replies.clear()
    assert names(stub) == ["pull-0", "pull-1"] * 2
    requests = stub.requests_to(PULL)
    assert {request.json["session"] for request in requests} == {"start-1"}
    assert [request.json.get("shard", 0) for request in requests] == [0, 0, 1, 1]


def test_a_rank_that_gave_up_repeats_the_same_pull(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, ok(WAITING), batch(shard_of("b0", 1, 2)))
    with connect() as client:
        with pytest.raises(NothingToServe):
            client.pull("guess", shard=1, shards=2, timeout_s=0)
        client.pull("guess", shard=1, shards=2)
    assert names(stub) == ["pull-0", "pull-0"]


def test_a_rank_whose_batch_is_over_continues_with_the_next_pull(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, problem(BatchSuperseded("It was given back.")), batch(shard_of("b1", 1, 2)))
    with connect() as client:
        with pytest.raises(BatchSuperseded):
            client.pull("guess", shard=1, shards=2)
        assert client.pull("guess", shard=1, shards=2).id == "b1"
    assert names(stub) == ["pull-0", "pull-1"]


def test_ranks_need_a_shared_session(stub: StubServer, connect: Connect) -> None:
    with connect(session="") as client:
        with pytest.raises(InvalidRequest, match="Rank 1 of 2 needs a session"):
            client.pull("guess", shard=1, shards=2)
        with pytest.raises(InvalidRequest, match="Rank 1 of 2 needs a session"):
            client.resume("guess", shard=1, shards=2)
    with connect() as client, pytest.raises(InvalidRequest, match="Shard 2 of 2 does not exist"):
        client.pull("guess", shard=2, shards=2)
    assert stub.requests == []


def test_resume_returns_the_remaining_batches_and_names_the_lost_ones(stub: StubServer, connect: Connect) -> None:
    reply = messages.ResumeReply(epoch=1, batches=["b0", "b1"], lost={"b9": "stale"})
    stub.on("POST /v1/runs/guess/resume", ok(reply))
    stub.on(PULL, batch(make_body("b0"), generation=2), problem(BatchSuperseded("Batch b1 was damaged.")))
    with connect() as client:
        batches, lost = client.resume("guess")
    assert [(pulled.id, pulled.generation) for pulled in batches] == [("b0", 2)]
    assert lost == {"b9": "stale", "b1": "Batch b1 was damaged."}
    assert [request.json["batch"] for request in stub.requests_to(PULL)] == ["b0", "b1"]

"""A rank of a data-parallel learner, and a learner that was started again."""

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
from tests.sdk.client.stub_server import Stub, batch, good, problem

PULL = "POST /v1/runs/guess/pull"
Connect = Callable[..., AbstractContextManager[Any]]

WAITING = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="collecting", message="2 of 4 ready")])


@pytest.fixture(params=CLIENTS)
def connect(request: pytest.FixtureRequest, stub: Stub) -> Connect:
    return lambda **options: request.param(stub.url, **{"keepalive": False, "session": "start-1", **options})


def shard_of(name: str, number: int, shards: int) -> bytes:
    body = make_body(name)
    head = read_head(body)
    cut = ShardedBatch(head, shards).cut(number)
    offsets = head.columns["record_offsets"] + head.records_start
    return cut.head + b"".join(body[offsets[n] : offsets[n + 1]] for n in cut.records)


def names(stub: Stub) -> list[str]:
    return [seen.json["request"] for seen in stub.asked(PULL)]


def test_every_rank_names_its_kth_pull_alike(stub: Stub, connect: Connect) -> None:
    for rank in range(2):
        stub.on(PULL, *(batch(shard_of(f"b{k}", rank, 2)) for k in (0, 1)))
        with connect() as client:
            for k in (0, 1):
                found = client.pull("guess", shard=rank, shards=2)
                assert (found.id, found.shard.number, len(found.shard.parts)) == (f"b{k}", rank, 2)
        stub._answers.clear()
    assert names(stub) == ["pull-0", "pull-1"] * 2
    asked = stub.asked(PULL)
    assert {seen.json["session"] for seen in asked} == {"start-1"}
    assert [seen.json.get("shard", 0) for seen in asked] == [0, 0, 1, 1]


def test_a_rank_that_gave_up_asks_for_the_same_pull_again(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, good(WAITING), batch(shard_of("b0", 1, 2)))
    with connect() as client:
        with pytest.raises(NothingToServe):
            client.pull("guess", shard=1, shards=2, timeout_s=0)
        client.pull("guess", shard=1, shards=2)
    assert names(stub) == ["pull-0", "pull-0"]


def test_a_rank_whose_batch_is_over_goes_on_with_the_next_pull(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, problem(BatchSuperseded("It was given back.")), batch(shard_of("b1", 1, 2)))
    with connect() as client:
        with pytest.raises(BatchSuperseded):
            client.pull("guess", shard=1, shards=2)
        assert client.pull("guess", shard=1, shards=2).id == "b1"
    assert names(stub) == ["pull-0", "pull-1"]


def test_ranks_need_a_session_that_they_share(stub: Stub, connect: Connect) -> None:
    with connect(session="") as client:
        with pytest.raises(InvalidRequest, match="Rank 1 of 2 needs a session"):
            client.pull("guess", shard=1, shards=2)
        with pytest.raises(InvalidRequest, match="Rank 1 of 2 needs a session"):
            client.resume("guess", shard=1, shards=2)
    with connect() as client, pytest.raises(InvalidRequest, match="no shard 2 of 2"):
        client.pull("guess", shard=2, shards=2)
    assert stub.seen == []


def test_resume_gives_what_is_left_and_names_what_is_lost(stub: Stub, connect: Connect) -> None:
    reply = messages.ResumeReply(epoch=1, batches=["b0", "b1"], lost={"b9": "stale"})
    stub.on("POST /v1/runs/guess/resume", good(reply))
    stub.on(PULL, batch(make_body("b0"), generation=2), problem(BatchSuperseded("Batch b1 was damaged.")))
    with connect() as client:
        batches, lost = client.resume("guess")
    assert [(found.id, found.generation) for found in batches] == [("b0", 2)]
    assert lost == {"b9": "stale", "b1": "Batch b1 was damaged."}
    assert [seen.json["batch"] for seen in stub.asked(PULL)] == ["b0", "b1"]

"""Pulling ahead of the training loop, with both clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from headrace.client.async_client import AsyncClient
from headrace.client.sync_client import Client
from headrace.errors import InvalidRequest, NothingToServe, UnknownRun
from headrace.wire import messages
from tests.sdk.client.conftest import make_body
from tests.sdk.client.routes import run_status
from tests.sdk.client.stub_server import Reply, Seen, Stub, batch, good, problem

PULL = "POST /v1/runs/guess/pull"
FINISHED = messages.EmptyReply(
    epoch=1, reasons=[messages.Reason(code="tasks-exhausted", message="done")], finished=True
)
WAITING = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="collecting", message="2 of 4 ready")])


async def has_arrived(client: Client | AsyncClient, name: str) -> None:
    """Returns when the batch was read ahead."""
    async with asyncio.timeout(10):
        while ("guess", name) not in client._flows.leases._held:
            await asyncio.sleep(0.001)


@pytest.fixture
def served(stub: Stub) -> Stub:
    """A run that allows one batch more, and takes acks and nacks."""
    stub.on("GET /v1/runs/guess", good(run_status(spec={"max_staleness": 1})))
    for number in range(1, 5):
        stub.on(
            f"POST /v1/runs/guess/batches/b{number}/ack", good(messages.AckReply(epoch=1, batch="b", version="0.1"))
        )
        stub.on(f"POST /v1/runs/guess/batches/b{number}/nack", good({}))
    return stub


def nacked(stub: Stub) -> list[str]:
    return [seen.path.split("/")[-2] for seen in stub.seen if seen.path.endswith("/nack")]


@contextlib.contextmanager
def threads_end() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-prefetch"]


def test_the_next_batch_is_fetched_while_the_learner_trains_on_this_one(served: Stub) -> None:
    served.on(PULL, *(batch(make_body(f"b{k}")) for k in (1, 2, 3)), good(FINISHED))
    trained = []
    with threads_end(), Client(served.url, keepalive=False) as client:
        for number, found in enumerate(client.batches("guess", prefetch=1), 1):
            served.wait_for(PULL, number + 1)  # asked for before this one is acked
            assert len(served.asked(PULL)) == number + 1, "and no more than that"
            client.ack(found, number)
            trained.append(found.id)
    assert trained == ["b1", "b2", "b3"]
    assert nacked(served) == []


def test_what_was_fetched_and_not_used_is_given_back_when_the_loop_ends(served: Stub) -> None:
    served.on(PULL, batch(make_body("b1")), batch(make_body("b2"), generation=7), good(WAITING))
    with threads_end(), Client(served.url, keepalive=False) as client:
        for found in client.batches("guess", prefetch=1):
            client.ack(found)
            asyncio.run(has_arrived(client, "b2"))
            break
        (back,) = served.wait_for("POST /v1/runs/guess/batches/b2/nack", 1)
        assert (back.json["generation"], back.json["reason"]) == (7, "prefetched and not used")


def test_closing_the_client_ends_a_pull_that_waits(served: Stub) -> None:
    let_go = threading.Event()

    def wait(seen: Seen) -> Reply:
        let_go.wait(10)
        return good(WAITING)

    served.on(PULL, batch(make_body("b1")), wait)
    with threads_end():
        client = Client(served.url, keepalive=False)
        loop = client.batches("guess", prefetch=1)
        next(loop)
        served.wait_for(PULL, 2)
        client.close()
        with pytest.raises(InvalidRequest, match="The client was closed"):
            next(loop)
    let_go.set()


def test_what_a_pull_raised_is_raised_in_the_loop_after_what_came_before_it(served: Stub) -> None:
    served.on(PULL, batch(make_body("b1")), problem(UnknownRun("It is gone.")))
    with threads_end(), Client(served.url, keepalive=False) as client:
        loop = client.batches("guess", prefetch=1)
        assert next(loop).id == "b1"
        with pytest.raises(UnknownRun, match="It is gone"):
            next(loop)


def test_a_run_whose_staleness_does_not_allow_it_refuses_at_once(served: Stub) -> None:
    with Client(served.url, keepalive=False) as client:
        with pytest.raises(
            InvalidRequest, match=r"prefetch=2 holds 3 batches, which needs max_staleness 2 or more; .* 1"
        ):
            next(client.batches("guess", prefetch=2))
        with pytest.raises(InvalidRequest, match="prefetch=-1"):
            next(client.batches("guess", prefetch=-1))
    assert served.asked(PULL) == []


def test_patience_counts_while_the_loop_waits_and_says_what_it_waited_on(served: Stub) -> None:
    served.on(PULL, good(WAITING))
    told: list[str] = []
    with threads_end(), Client(served.url, keepalive=False) as client:
        loop = client.batches(
            "guess", prefetch=1, timeout_s=0.6, on_wait=lambda run, reasons: told.append(reasons[0].code)
        )
        with pytest.raises(NothingToServe, match=r"within 0\.6 s\. 2 of 4 ready") as ended:
            next(loop)
    assert ended.value.extra["reasons"][0]["code"] == "collecting"
    assert set(told) == {"collecting"}


async def test_the_async_client_fetches_ahead_and_gives_back(served: Stub) -> None:
    served.on(PULL, *(batch(make_body(f"b{k}")) for k in (1, 2, 3)), good(WAITING))
    trained = []
    async with AsyncClient(served.url, keepalive=False) as client:
        async with contextlib.aclosing(client.batches("guess", prefetch=1)) as loop:
            async for found in loop:
                trained.append(found.id)
                await client.ack(found)
                await has_arrived(client, f"b{len(trained) + 1}")
                if len(trained) == 2:
                    break
        with pytest.raises(InvalidRequest, match="prefetch=2"):
            await anext(aiter(client.batches("guess", prefetch=2)))
    assert trained == ["b1", "b2"]
    assert nacked(served) == ["b3"]


async def test_the_end_of_the_run_and_errors_come_through_in_the_async_client(served: Stub) -> None:
    served.on(PULL, batch(make_body("b1")), good(FINISHED), problem(UnknownRun("It is gone.")))
    async with AsyncClient(served.url, keepalive=False) as client:
        assert [found.id async for found in client.batches("guess", prefetch=1)] == ["b1"]
        with pytest.raises(UnknownRun, match="It is gone"):
            await anext(aiter(client.batches("guess", prefetch=1)))


async def test_the_async_loop_tells_what_it_waits_on(served: Stub) -> None:
    served.on(PULL, good(WAITING))
    told: list[str] = []
    async with AsyncClient(served.url, keepalive=False) as client:
        loop = client.batches("guess", prefetch=1, timeout_s=0.6, on_wait=lambda run, said: told.append(said[0].code))
        with pytest.raises(NothingToServe, match=r"within 0\.6 s\. 2 of 4 ready"):
            await anext(aiter(loop))
    assert set(told) == {"collecting"}

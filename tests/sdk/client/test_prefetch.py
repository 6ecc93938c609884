"""Prefetching, with both clients."""

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
from tests.sdk.client.stub_server import ReceivedRequest, Reply, StubServer, batch, ok, problem

PULL = "POST /v1/runs/guess/pull"
FINISHED = messages.EmptyReply(
    epoch=1, reasons=[messages.Reason(code="tasks-exhausted", message="done")], finished=True
)
WAITING = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="collecting", message="2 of 4 ready")])


async def has_arrived(client: Client | AsyncClient, name: str) -> None:
    """Wait until the batch was prefetched."""
    async with asyncio.timeout(10):
        while ("guess", name) not in client._operations.leases._leases:
            await asyncio.sleep(0.001)


@pytest.fixture
def served(stub: StubServer) -> StubServer:
    """A run that allows one prefetched batch, and accepts acks and nacks."""
    stub.on("GET /v1/runs/guess", ok(run_status(spec={"max_staleness": 1})))
    for number in range(1, 5):
        stub.on(f"POST /v1/runs/guess/batches/b{number}/ack", ok(messages.AckReply(epoch=1, batch="b", version="0.1")))
        stub.on(f"POST /v1/runs/guess/batches/b{number}/nack", ok({}))
    return stub


def nacked(stub: StubServer) -> list[str]:
    return [request.path.split("/")[-2] for request in stub.requests if request.path.endswith("/nack")]


@contextlib.contextmanager
def threads_end() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-prefetch"]


def test_the_next_batch_is_fetched_while_the_learner_trains_on_this_one(served: StubServer) -> None:
    served.on(PULL, *(batch(make_body(f"b{k}")) for k in (1, 2, 3)), ok(FINISHED))
    trained = []
    with threads_end(), Client(served.url, keepalive=False) as client:
        for number, pulled in enumerate(client.batches("guess", prefetch=1), 1):
            served.wait_for(PULL, number + 1)  # requested before this one is acked
            assert len(served.requests_to(PULL)) == number + 1, "no more than one is prefetched"
            client.ack(pulled, number)
            trained.append(pulled.id)
    assert trained == ["b1", "b2", "b3"]
    assert nacked(served) == []


def test_unused_batches_are_given_back_when_the_loop_ends(served: StubServer) -> None:
    served.on(PULL, batch(make_body("b1")), batch(make_body("b2"), generation=7), ok(WAITING))
    with threads_end(), Client(served.url, keepalive=False) as client:
        for pulled in client.batches("guess", prefetch=1):
            client.ack(pulled)
            asyncio.run(has_arrived(client, "b2"))
            break
        (back,) = served.wait_for("POST /v1/runs/guess/batches/b2/nack", 1)
        assert (back.json["generation"], back.json["reason"]) == (7, "prefetched and not used")


def test_closing_the_client_ends_a_waiting_pull(served: StubServer) -> None:
    let_go = threading.Event()

    def wait(request: ReceivedRequest) -> Reply:
        let_go.wait(10)
        return ok(WAITING)

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


def test_an_error_of_a_pull_is_raised_after_the_batches_before_it(served: StubServer) -> None:
    served.on(PULL, batch(make_body("b1")), problem(UnknownRun("The run was deleted.")))
    with threads_end(), Client(served.url, keepalive=False) as client:
        loop = client.batches("guess", prefetch=1)
        assert next(loop).id == "b1"
        with pytest.raises(UnknownRun, match="The run was deleted"):
            next(loop)


def test_prefetching_beyond_the_runs_staleness_is_refused_at_once(served: StubServer) -> None:
    with Client(served.url, keepalive=False) as client:
        with pytest.raises(
            InvalidRequest, match=r"prefetch=2 holds 3 batches, which needs max_staleness 2 or more; .* 1"
        ):
            next(client.batches("guess", prefetch=2))
        with pytest.raises(InvalidRequest, match="prefetch=-1"):
            next(client.batches("guess", prefetch=-1))
    assert served.requests_to(PULL) == []


def test_the_timeout_counts_while_the_loop_waits_and_its_error_has_the_reasons(served: StubServer) -> None:
    served.on(PULL, ok(WAITING))
    reports: list[str] = []
    with threads_end(), Client(served.url, keepalive=False) as client:
        loop = client.batches(
            "guess", prefetch=1, timeout_s=0.6, on_wait=lambda run, reasons: reports.append(reasons[0].code)
        )
        with pytest.raises(NothingToServe, match=r"within 0\.6 s\. 2 of 4 ready") as ended:
            next(loop)
    assert ended.value.extra["reasons"][0]["code"] == "collecting"
    assert set(reports) == {"collecting"}


async def test_the_async_client_prefetches_and_gives_back_unused_batches(served: StubServer) -> None:
    served.on(PULL, *(batch(make_body(f"b{k}")) for k in (1, 2, 3)), ok(WAITING))
    trained = []
    async with AsyncClient(served.url, keepalive=False) as client:
        async with contextlib.aclosing(client.batches("guess", prefetch=1)) as loop:
            async for pulled in loop:
                trained.append(pulled.id)
                await client.ack(pulled)
                await has_arrived(client, f"b{len(trained) + 1}")
                if len(trained) == 2:
                    break
        with pytest.raises(InvalidRequest, match="prefetch=2"):
            await anext(aiter(client.batches("guess", prefetch=2)))
    assert trained == ["b1", "b2"]
    assert nacked(served) == ["b3"]


async def test_the_async_client_raises_errors_and_ends_with_the_run(served: StubServer) -> None:
    served.on(PULL, batch(make_body("b1")), ok(FINISHED), problem(UnknownRun("The run was deleted.")))
    async with AsyncClient(served.url, keepalive=False) as client:
        assert [pulled.id async for pulled in client.batches("guess", prefetch=1)] == ["b1"]
        with pytest.raises(UnknownRun, match="The run was deleted"):
            await anext(aiter(client.batches("guess", prefetch=1)))


async def test_the_async_client_reports_the_reasons_of_a_wait(served: StubServer) -> None:
    served.on(PULL, ok(WAITING))
    reports: list[str] = []
    async with AsyncClient(served.url, keepalive=False) as client:
        loop = client.batches(
            "guess", prefetch=1, timeout_s=0.6, on_wait=lambda run, reasons: reports.append(reasons[0].code)
        )
        with pytest.raises(NothingToServe, match=r"within 0\.6 s\. 2 of 4 ready"):
            await anext(aiter(loop))
    assert set(reports) == {"collecting"}

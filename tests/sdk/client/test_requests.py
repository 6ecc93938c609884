"""Requests, retries and proxies: both clients against a scripted server on a real socket."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from headrace.batch.batch import Batch
from headrace.client.sync_client import Client
from headrace.errors import (
    InvalidRequest,
    RequestTooLarge,
    ServiceError,
    SetupError,
    StoreError,
    Unavailable,
    UnknownRun,
    UnknownServer,
)
from headrace.wire import messages
from tests.sdk.client.both_clients import CLIENTS, Connect
from tests.sdk.client.routes import PULL, SPEC, run_status
from tests.sdk.client.stub_server import NO_RESPONSE, Reply, StubServer, batch, ok, page, problem

# Requests and responses


def test_a_pull_returns_a_batch_whose_arrays_are_views_of_one_aligned_buffer(
    stub: StubServer, connect: Connect, body: bytes
) -> None:
    stub.on(PULL, batch(body, generation=2, lease_s=120.0))
    with connect(learner="trainer") as client:
        pulled = client.pull("guess")
    assert (pulled.id, pulled.generation, pulled.lease_s) == ("batch-1", 2, 120.0)
    tokens = pulled.rows[0].token_ids
    assert np.shares_memory(tokens, np.frombuffer(pulled.records, np.uint8))
    assert np.frombuffer(pulled.records, np.uint8).ctypes.data % 64 == 0
    (request,) = stub.requests_to(PULL)
    assert request.json["learner"] == "trainer"
    assert request.json["wait_s"] == 20.0


def test_a_pull_may_ask_for_environments_and_tags(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body), batch(body))
    with connect() as client:
        client.pull("guess", environments=["game:A", "game:B"], tags=["hard"])
        next(iter(client.batches("guess", tags={"easy"})))
    first, second = stub.requests_to(PULL)
    assert (first.json["environments"], first.json["tags"]) == (["game:A", "game:B"], ["hard"])
    assert ("environments" in second.json, second.json["tags"]) == (False, ["easy"])


def test_priorities_are_set_by_group(stub: StubServer, connect: Connect) -> None:
    reply = messages.PrioritiesReply(epoch=1, set=1, over=["g2"])
    stub.on("POST /v1/runs/guess/priorities", ok(reply))
    with connect() as client:
        assert client.set_priorities("guess", {"g1": 2, "g2": np.float64(0.5)}) == reply
    (request,) = stub.requests_to("POST /v1/runs/guess/priorities")
    assert request.json == {"priorities": {"g1": 2.0, "g2": 0.5}}


def test_a_token_is_sent_as_a_bearer_token_and_compression_is_refused(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs", ok([]))
    with connect(token="sesame") as client:
        assert client.runs() == []
    (request,) = stub.requests_to("GET /v1/runs")
    assert request.headers["Authorization"] == "Bearer sesame"
    assert request.headers["Accept-Encoding"] == "identity"


def test_a_line_end_after_the_token_is_removed(
    stub: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.on("GET /v1/runs", ok([]))
    monkeypatch.setenv("HEADRACE_TOKEN", "sesame\n")
    with connect() as client:
        client.runs()
    assert stub.requests_to("GET /v1/runs")[0].headers["Authorization"] == "Bearer sesame"
    with pytest.raises(SetupError, match="line end"), connect(token="ses\name"):
        pass


def test_address_and_token_come_from_the_environment_unless_they_are_given(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_URL", stub.url)
    monkeypatch.setenv("HEADRACE_TOKEN", "sesame")
    stub.on("GET /v1/runs", ok([]))
    with Client() as client:
        client.runs()
    assert stub.requests_to("GET /v1/runs")[0].headers["Authorization"] == "Bearer sesame"


def test_proxy_settings_of_the_environment_are_ignored(
    stub: StubServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    stub.on("GET /v1/runs", ok([run_status()]))
    with connect() as client:
        assert client.runs()[0].name == "guess"


def test_a_connection_is_kept_between_calls(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs", ok([]))
    with connect() as client:
        client.runs()
        client.runs()
    first, second = stub.requests_to("GET /v1/runs")
    assert first.connection == second.connection


def test_a_connection_that_the_server_has_closed_is_not_reused(stub: StubServer, connect: Connect) -> None:
    reply = messages.VersionReply(epoch=1, version="1.2")
    stub.on("GET /v1/runs", replace(ok([]), hang_up=True))
    stub.on("POST /v1/runs/guess/rewind", ok(reply))
    with connect() as client:
        client.runs()
        assert stub.hung_up.wait(10)
        assert client.rewind("guess", "0.2") == reply


def test_a_request_is_sent_in_one_write(body: bytes) -> None:
    pieces = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                pieces.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        served = threads.submit(serve)
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            client.nack(Batch.parse(body), "a reason")
        served.result(30)
    assert b"HTTP/1.1" in pieces[0]
    assert b"a reason" in pieces[0]


def test_several_threads_may_share_a_client(stub: StubServer) -> None:
    stub.on("GET /v1/runs", ok([run_status()]))
    with Client(stub.url) as client, ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: client.runs()[0].name, range(40)))
    assert names == ["guess"] * 40


def test_names_are_quoted_in_paths(stub: StubServer, connect: Connect) -> None:
    stub.on("POST /v1/workers/a%2Fb%20c/drain", ok({"epoch": 1}))
    with connect() as client:
        client.drain_worker("a/b c")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8470", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_an_invalid_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:8470"):
        Client(url or "nowhere")


def test_an_error_of_the_service_is_raised_as_its_own_class(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs/gues", problem(UnknownRun("No run 'gues'.", hint="Known: guess.", known=["guess"])))
    with connect() as client, pytest.raises(UnknownRun, match=r"No run 'gues'\. Known: guess\.") as caught:
        client.run("gues")
    assert caught.value.extra == {"known": ["guess"]}


# Retries


def test_every_call_is_safe_to_repeat_and_is_repeated_until_there_is_a_response(
    stub: StubServer, connect: Connect
) -> None:
    starting = problem(Unavailable("Reading the log."))
    stub.on("GET /v1/runs", NO_RESPONSE, starting, page(502), Reply(200, b"[]" * 5, cut=True), ok([]))
    with connect() as client:
        assert client.runs() == []
    assert len(stub.requests_to("GET /v1/runs")) == 5


def test_an_outage_longer_than_retry_for_s_raises_unavailable(connect: Connect, stub: StubServer) -> None:
    stub.on("GET /v1/runs", NO_RESPONSE)
    with connect(retry_for_s=0.1) as client, pytest.raises(Unavailable, match="No response") as caught:
        client.runs()
    assert caught.value.extra["outcome"] == "unknown"


def test_an_outage_raises_its_error_with_the_key_of_the_call(connect: Connect, stub: StubServer) -> None:
    stub.on("POST /v1/runs/guess/rewind", NO_RESPONSE)
    stub.on("POST /v1/runs/guess/evaluations", NO_RESPONSE)
    with connect(retry_for_s=0.1) as client:
        with pytest.raises(Unavailable) as rewind:
            client.rewind("guess", "0.2")
        with pytest.raises(Unavailable) as evaluate:
            client.evaluate("guess", [{"environment": "e"}], key="nightly")
    sent = {request.json["key"] for request in stub.requests_to("POST /v1/runs/guess/rewind")}
    assert sent == {rewind.value.extra["key"]}
    assert evaluate.value.extra["key"] == "nightly"


@pytest.mark.parametrize("kind", CLIENTS, ids=["sync", "async"])
def test_a_refused_connection_raises_unavailable_with_the_address(kind: Connect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            kind(url, retry_for_s=0.0) as client,
            pytest.raises(Unavailable, match=f"cannot connect to {url}") as caught,
        ):
            client.runs()
    assert caught.value.extra["outcome"] == "not-done"


def test_a_call_that_changes_something_is_recognized_as_a_repeat_by_a_key(stub: StubServer, connect: Connect) -> None:
    done = messages.EvaluationReply(epoch=1, evaluation="e", version="0.1", wanted=1, done=1, finished=True, hold_s=0.0)
    stub.on("POST /v1/runs/guess/rewind", NO_RESPONSE, ok(messages.VersionReply(epoch=1, version="1.2")))
    stub.on("POST /v1/runs/guess/evaluations", page(502), NO_RESPONSE, ok(done))
    stub.on("POST /v1/workers/w/drain", NO_RESPONSE, ok({}))
    with connect() as client:
        assert client.rewind("guess", "0.2").version == "1.2"
        assert client.evaluate("guess", [{"environment": "e"}]) == done
        client.drain_worker("w")
    for route, tries in (("rewind", 2), ("evaluations", 3)):
        keys = [request.json["key"] for request in stub.requests_to(f"POST /v1/runs/guess/{route}")]
        assert len(keys) == tries
        assert len(set(keys)) == 1
        assert keys[0]
    drains = [request.path for request in stub.requests if "drain" in request.path]
    assert len(drains) == 2
    assert len(set(drains)) == 1


def test_a_server_whose_removal_was_answered_with_a_broken_connection_is_removed(
    stub: StubServer, connect: Connect
) -> None:
    gone = problem(UnknownServer("No such server."))
    stub.on("DELETE /v1/runs/guess/servers", NO_RESPONSE, gone)
    with connect() as client:
        client.remove_server("guess", "http://127.0.0.1:1")
        with pytest.raises(UnknownServer):
            client.remove_server("guess", "http://127.0.0.1:1")


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_a_request_is_sent_once_the_operations_repeat_it(method: str, stub: StubServer, connect: Connect) -> None:
    calls = {
        "GET": ("GET /v1/runs", lambda client: client.runs()),
        "POST": ("POST /v1/runs/guess/close", lambda client: client.close_run("guess")),
        "DELETE": ("DELETE /v1/runs/guess/servers", lambda client: client.remove_server("guess", "http://127.0.0.1:1")),
    }
    route, call = calls[method]
    stub.on(route, NO_RESPONSE)
    with connect(retry_for_s=0.0) as client, pytest.raises(Unavailable):
        call(client)
    assert len(stub.requests_to(route)) == 1


def test_a_full_disk_is_treated_like_an_outage(stub: StubServer, connect: Connect) -> None:
    full = problem(StoreError("The log cannot be written: No space left on device."))
    stub.on("GET /v1/runs", full, full, ok([]))
    stub.on("POST /v1/runs/guess/rewind", full, ok(messages.VersionReply(epoch=1, version="1.2")))
    with connect() as client:
        assert client.runs() == []
        assert client.rewind("guess", "0.2").version == "1.2"
    stub.on("GET /v1/runs/guess", full)
    with connect(retry_for_s=0.0) as client, pytest.raises(StoreError, match="No space left"):
        client.run("guess")


def test_a_response_with_an_older_epoch_is_refused_and_the_request_repeated(stub: StubServer, connect: Connect) -> None:
    old, new = run_status(version="0.1"), run_status(version="0.9")
    stub.on("GET /v1/runs/guess", ok(new, epoch=7), ok(old, epoch=6), ok(new, epoch=7))
    with connect() as client:
        assert client.run("guess").version == "0.9"
        assert client.run("guess").version == "0.9"
    assert len(stub.requests) == 3


def test_an_error_for_an_older_epoch_names_both_epochs(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs", ok([], epoch=7), ok([], epoch=6))
    with connect(retry_for_s=0.0) as client:
        client.runs()
        with pytest.raises(Unavailable, match=r"epoch 6, the newest is epoch 7"):
            client.runs()


# Proxies (G04)


def test_after_a_proxys_page_a_pull_is_repeated_with_the_same_request_id_and_a_shorter_wait(
    stub: StubServer, connect: Connect, body: bytes
) -> None:
    stub.on(PULL, page(504), page(504), batch(body))
    with connect() as client:
        assert client.pull("guess").id == "batch-1"
    requests = [request.json for request in stub.requests_to(PULL)]
    assert len({request["request"] for request in requests}) == 1
    assert [request["wait_s"] for request in requests] == [20.0, 10.0, 5.0]


def test_a_proxys_page_becomes_an_error_with_status_media_type_and_wait(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, page(504))
    with connect(retry_for_s=0.0) as client, pytest.raises(Unavailable) as caught:
        client.pull("guess")
    assert "proxy" in str(caught.value)
    assert "504 (text/html)" in str(caught.value)
    assert "wait_s = 20" in str(caught.value)
    assert caught.value.extra["server"] == "proxy/1.0"


def test_the_pull_after_one_that_gave_up_continues_it(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, page(504), batch(body))
    with connect(retry_for_s=0.0) as client:
        with pytest.raises(Unavailable):
            client.pull("guess")
        client.pull("guess")
        client.pull("guess")
    first, second, third = (request.json["request"] for request in stub.requests_to(PULL))
    assert first == second != third


def test_a_refused_body_names_its_size_and_the_limit_to_raise(stub: StubServer, connect: Connect) -> None:
    stub.on("POST /v1/runs", page(413))
    with connect() as client, pytest.raises(RequestTooLarge, match="max_body_bytes"):
        client.create_run(SPEC)


def test_a_page_with_a_success_status_raises_service_error(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs", page(200))
    stub.on(PULL, page(200))
    with connect() as client:
        with pytest.raises(ServiceError, match="text/html"):
            client.runs()
        with pytest.raises(ServiceError, match="not a batch"):
            client.pull("guess")

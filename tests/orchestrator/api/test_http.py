"""The orchestrator's HTTP: connections, their ends, and requests without a task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from headrace.server.uvicorn_protocol import SMALL_BYTES
from headrace.wire.messages import RECORDS_MEDIA_TYPE
from headrace_orchestrator.api.app import OrchestratorApp
from headrace_orchestrator.api.http import HttpResponse, response_head
from tests.orchestrator.serving import Api, orchestrator, record_for, submission

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTHY = b'{"epoch":1}'
LEASE = b'{"worker":"w","slots":1,"free":1,"wait_s":0.5}'
HEAD = (
    b"POST /v1/worker/lease HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@contextlib.asynccontextmanager
async def connected(api: Api) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = api.session._base_url
    assert url is not None
    assert url.host is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(20):
        yield reader, writer
    writer.close()


IDLE_TIMEOUT, REQUEST_TIMEOUT = "headrace.server.process.KEEP_ALIVE_S", "headrace_orchestrator.server.REQUEST_TIMEOUT_S"


async def is_closed(data_dir: Path, before: bytes, said: bytes) -> None:
    """Require that a connection is closed on which a client sent ``said``, after the request ``before`` if any."""
    async with orchestrator(data_dir) as api, connected(api) as (reader, writer):
        if before:
            writer.write(before)
            await reader.readuntil(b"}")
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("before", "said"),
    [(b"", b""), (b"", b"\r\n"), (HEALTH, b"\r\n")],
    ids=["silent", "an empty line", "an empty line after a request"],
)
async def test_a_connection_on_which_no_request_begins_is_closed(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, said: bytes
):
    monkeypatch.setattr(IDLE_TIMEOUT, 0.5)  # long enough for the first request on a loaded machine
    await is_closed(data_dir, before, said)


@pytest.mark.parametrize("said", [b"G", HEAD[:40], HEAD % 100 + LEASE], ids=["a letter", "half a head", "half a body"])
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["at first", "after another"])
async def test_a_connection_whose_request_is_not_complete_in_time_is_closed(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, said: bytes
):
    monkeypatch.setattr(REQUEST_TIMEOUT, 0.05)
    await is_closed(data_dir, before, said)


async def test_a_complete_request_is_answered_however_long_that_takes(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(IDLE_TIMEOUT, 0.3)
    monkeypatch.setattr(REQUEST_TIMEOUT, 0.3)
    async with orchestrator(data_dir) as api, connected(api) as (reader, writer):
        writer.write(HEAD % len(LEASE) + LEASE[:-1])
        await api.ask("GET", "/healthz")
        writer.write(LEASE[-1:])
        assert b" 200 " in await reader.readline()


async def test_responses_are_sent_in_the_order_of_their_requests(api: Api):
    async with connected(api) as (reader, writer):
        writer.write(HEALTH + HEALTH.replace(b"healthz", b"nothing") + HEALTH)
        for status in (b"200", b"404", b"200"):
            assert status in await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(int(length[16:]))


async def test_a_head_request_gets_the_length_and_no_body(api: Api):
    async with connected(api) as (reader, writer):
        writer.write(HEALTH.replace(b"GET", b"HEAD") + HEALTH)
        assert b"content-length: %d\r\n" % len(HEALTHY) in await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(len(HEALTHY)) == HEALTHY


@pytest.mark.parametrize(
    "request_", [HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), HEALTH.replace(b"1.1", b"1.0")]
)
async def test_a_response_says_that_the_connection_ends_where_it_does(api: Api, request_: bytes):
    async with connected(api) as (reader, writer):
        writer.write(request_)
        answer = await cast(Any, reader.read())
        assert b"\r\nconnection: close\r\n\r\n" in answer
        assert answer.endswith(HEALTHY)


def post(body: bytes, query: str = "?worker=worker-1", *headers: str) -> bytes:
    lines = [f"POST /v1/worker/submit{query} HTTP/1.1", "Host: localhost", f"Content-Type: {RECORDS_MEDIA_TYPE}"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", *headers, "\r\n"]).encode() + body


async def status_of(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    await reader.readexactly(int(length[16:]))
    return int(head.split()[1])


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the requests that get a task of their own."""
    paths: list[str] = []
    call = OrchestratorApp.__call__

    async def noted(app: OrchestratorApp, scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await call(app, scope, receive, send)

    monkeypatch.setattr(OrchestratorApp, "__call__", noted)
    return paths


async def test_a_small_request_to_a_route_with_a_direct_handler_needs_no_task_of_its_own(
    data_dir: Path, tasks: list[str]
):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempt, *_ = await api.lease(free=1)
        good = submission([(attempt, record_for(attempt))])
        tasks.clear()
        async with connected(api) as (reader, writer):
            for sent, status in (
                (post(good), 200),
                (post(b"none"), 400),
                (post(good, ""), 400),
                (post(good) + post(b"none"), 200),
            ):
                writer.write(sent)
                assert await status_of(reader) == status
            assert await status_of(reader) == 400
        assert not tasks
        run = await api.ask("GET", "/v1/runs/run")
        assert run["episodes"]["finished"] == 1


async def test_a_request_that_is_longer_or_refused_before_its_body_gets_a_task(data_dir: Path, tasks: list[str]):
    async with orchestrator(data_dir) as api, connected(api) as (reader, writer):
        writer.write(post(bytes(SMALL_BYTES + 1)))
        assert await status_of(reader) == 400
        whole = post(b"none", "?worker=worker-1", "Origin: http://elsewhere")
        writer.write(whole[:-4])  # its body never comes
        assert await status_of(reader) == 403
    assert tasks == ["/v1/worker/submit"] * 2


@pytest.mark.parametrize("broken", ["submissions.parse_submission", "submission_records.SubmissionJudge.judge"])
async def test_an_unexpected_error_of_a_direct_handler_is_logged_and_answers_its_client_only(
    api: Api, tasks: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
):
    error, log = ZeroDivisionError(), Mock()

    def break_(*args: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(f"headrace_orchestrator.service.{broken}", break_)
        patched.setattr("headrace_orchestrator.api.app.log", log)
        async with connected(api) as (reader, writer):
            writer.write(post((2).to_bytes(4, "little") + b"[]"))
            assert await status_of(reader) == 500
    assert log.error.call_args.kwargs["exc_info"] is error
    async with connected(api) as (reader, writer):
        writer.write(post(b"none"))
        assert await status_of(reader) == 400
    assert not tasks


@pytest.mark.parametrize("value", ["one\r\nSet-Cookie: two", "\0"])
def test_a_header_that_would_break_its_line_is_refused(value: str):
    with pytest.raises(ValueError, match="'Name' cannot be"):
        response_head(HttpResponse(b"", headers={"Name": value}), b"", 1)
    assert response_head(HttpResponse(b"", headers={"Name": "value"}), b"", 1).endswith(b"name: value\r\n")

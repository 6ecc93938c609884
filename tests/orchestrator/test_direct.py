"""Requests that are taken without a task of their own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.wire.messages import RECORDS_MEDIA_TYPE
from headrace_orchestrator.api.app import OrchestratorApp
from headrace_orchestrator.api.direct import SMALL_BYTES, Direct, Reply
from headrace_orchestrator.api.http import HttpResponse, response_head
from tests.orchestrator.serving import Api, orchestrator, record_for, submission
from tests.orchestrator.test_answering import Wire, protocol_of
from tests.orchestrator.test_request_timeouts import connected

HEAD = b"POST /direct HTTP/1.1\r\nContent-Length: 4\r\n"


class Taking:
    """Takes what is sent to /direct; ``tasks`` are the paths of what came the way of all requests."""

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, Reply]] = []
        self.tasks: list[str] = []
        self.ends: list[str] = []

    def direct(self, scope: Any) -> Direct | None:
        return (lambda body, reply: self.taken.append((body, reply))) if scope["path"] == "/direct" else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.tasks.append(scope["path"])
        self.ends.append((await receive())["type"])

    def answer(self, number: int) -> None:
        body, reply = self.taken[number]
        reply(200, b"content-length: %d\r\n" % len(body), body)


def answers(*bodies: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body) for body in bodies]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_is_handed_over_when_its_body_is_whole_and_answered_when_that_says_so():
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(HEAD + b"\r\nbo")
    await settled()
    assert not app.taken
    wire.receive(b"dy")
    assert [body for body, _ in app.taken] == [b"body"]
    await settled()
    assert not wire.written
    app.answer(0)
    assert wire.written == answers(b"body")
    assert not app.tasks
    protocol.connection_lost(None)


async def test_requests_of_a_connection_are_answered_one_after_the_other_in_their_order():
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(HEAD + b"\r\none." + HEAD + b"\r\ntwo.")
    assert [body for body, _ in app.taken] == [b"one."]
    app.answer(0)
    assert [body for body, _ in app.taken] == [b"one.", b"two."]
    app.answer(1)
    assert wire.written == answers(b"one.", b"two.")
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    "request_", [HEAD + b"Expect: 100-continue\r\n\r\n", HEAD.replace(b"/direct", b"/all") + b"\r\n"]
)
async def test_one_that_asks_whether_to_send_its_body_goes_the_way_of_all_as_does_what_is_not_taken(request_: bytes):
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(request_)
    await settled()
    wire.receive(b"body")
    await settled()
    assert not app.taken
    assert len(app.tasks) == 1
    protocol.connection_lost(None)


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_treated_as_any_other():
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(HEAD + b"\r\nbo")
    protocol.connection_lost(None)
    await settled()
    assert not app.taken
    assert app.ends == ["http.disconnect"]


async def test_nothing_of_a_request_is_kept_once_it_is_answered():
    """The collector of cycles seldom looks at what is old."""
    app, wire = Taking(), Wire()
    gc.disable()
    try:
        protocol = protocol_of(app, wire)
        wire.receive(HEAD + b"\r\nbody")
        assert not protocol.cycle.body
        app.answer(0)
        app.taken.clear()
        protocol.connection_lost(None)
        kept = weakref.ref(protocol)
        wire.set_protocol(asyncio.Protocol())
        protocol = None  # type: ignore[assignment]
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [lambda protocol, wire: protocol.connection_lost(None), lambda _, wire: wire.close()])
async def test_an_answer_is_dropped_where_the_client_left_or_the_connection_was_closed(end: Any):
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(HEAD + b"\r\nbody")
    end(protocol, wire)
    app.answer(0)
    assert not wire.written


async def test_an_answer_waits_for_a_client_that_does_not_read():
    app, wire = Taking(), Wire()
    protocol = protocol_of(app, wire)
    wire.receive(HEAD + b"\r\nbody")
    protocol.pause_writing()
    app.answer(0)
    await settled()
    assert not wire.written
    protocol.resume_writing()
    await settled()
    assert wire.written == answers(b"body")
    protocol.connection_lost(None)


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
    """The paths of what comes the way of all requests."""
    paths: list[str] = []
    call = OrchestratorApp.__call__

    async def noted(app: OrchestratorApp, scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await call(app, scope, receive, send)

    monkeypatch.setattr(OrchestratorApp, "__call__", noted)
    return paths


async def test_a_small_submission_needs_no_task_and_is_refused_in_the_same_words(data_dir: Path, tasks: list[str]):
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
        counted = await api.ask("GET", "/v1/runs/run")
        assert counted["episodes"]["finished"] == 1


async def test_what_is_longer_or_refused_before_its_body_goes_the_way_of_all(data_dir: Path, tasks: list[str]):
    async with orchestrator(data_dir) as api, connected(api) as (reader, writer):
        writer.write(post(bytes(SMALL_BYTES + 1)))
        assert await status_of(reader) == 400
        whole = post(b"none", "?worker=worker-1", "Origin: http://elsewhere")
        writer.write(whole[:-4])  # its body never comes
        assert await status_of(reader) == 403
    assert tasks == ["/v1/worker/submit"] * 2


@pytest.mark.parametrize("broken", ["submissions.parse_submission", "submission_records.SubmissionJudge.judge"])
async def test_what_goes_wrong_unexpectedly_is_told_to_its_client_only_and_logged_whole(
    api: Api, tasks: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
):
    error, log = ZeroDivisionError(), Mock()

    def break_(*given: object) -> None:
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

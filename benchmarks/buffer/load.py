"""Load of prepared submissions over raw sockets, so that the client uses little CPU time.

* Every record is a valid trajectory of a leased attempt, and must be accepted.
* Requests are encoded before the clock starts; then the client only sends and receives.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import numpy as np

from headrace.common.ids import new_id
from headrace.trajectory import (
    PolicyRef,
    Provenance,
    Sampling,
    Segment,
    Timing,
    Tokenizer,
    Trajectory,
    Turn,
    Version,
    VersionRun,
)
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT
from headrace.wire.codec import encode

WORKER = "bench"

TOKENS = 4096
"""Tokens of a long trajectory."""

ATTEMPT_LEASE_S = 3600.0
"""Long enough that no attempt expires while its record waits to be sent."""


class SendCost(NamedTuple):
    """Duration of sending, and the client's CPU time."""

    wall_s: float
    cpu_s: float


def lease(url: str, count: int) -> list[messages.Assignment]:
    """Lease ``count`` attempts, of any run."""
    attempts: list[messages.Assignment] = []
    while len(attempts) < count:
        free = min(count - len(attempts), 4096)
        request = messages.LeaseRequest(worker=WORKER, slots=count, free=free, wait_s=5)
        answer = _post_json(f"{url}/v1/worker/lease", msgspec.json.encode(request))
        granted = msgspec.json.decode(answer, type=messages.LeaseReply).attempts
        assert granted, f"only {len(attempts)} of {count} attempts were granted"
        attempts += granted
    return attempts


def _post_json(url: str, body: bytes) -> bytes:
    request = Request(url, body, {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
        return bytes(answer.read())


def long_trajectory(item: messages.Assignment, number: int) -> Trajectory:
    """8 turns of 256 sampled tokens, 4,096 tokens in all."""
    generator = np.random.default_rng(number)
    sampled = np.tile(np.repeat(np.array([0, 1], np.uint8), 256), 8)
    logprobs = np.where(sampled == 1, -generator.random(TOKENS), 0).astype(np.float32)
    turns = [
        Turn(index=k, start=512 * k + 256, end=512 * k + 512, reward=float(k == 7), terminated=k == 7) for k in range(8)
    ]
    segment = Segment(
        agent="agent",
        policy=PolicyRef(base="policy"),
        sampling=Sampling(),
        train=True,
        token_ids=generator.integers(0, 32_000, TOKENS).astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        versions=[VersionRun(TOKENS, *Version(0, 0))],
        turns=turns,
    )
    return Trajectory(
        id=new_id(),
        run=item.run,
        group=item.group,
        member=item.member,
        episode=item.episode,
        attempt=item.attempt,
        task=item.task,
        status="finished",
        stop_reason="terminated",
        failure=None,
        segments=[segment],
        messages=[],
        tokenizer=Tokenizer(name="bench", fingerprint="bench", vocab_size=32_000),
        assets=[],
        timing=Timing(),
        provenance=Provenance(worker="bench"),
    )


class Template:
    """Template of records that differ only in the fields that identify the attempt."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    @classmethod
    def long(cls, attempt: messages.Assignment) -> Template:
        """Make records of 4,096 tokens and 37 KB."""
        return cls(long_trajectory(attempt, 0))

    @classmethod
    def short(cls, attempt: messages.Assignment) -> Template:
        """Make records of one turn of 16 tokens."""
        long = long_trajectory(attempt, 0)
        segment = msgspec.structs.replace(
            long.segments[0],
            token_ids=np.arange(32, dtype=np.int32),
            sampled=np.repeat(np.array([0, 1], np.uint8), 16),
            logprobs=np.repeat(np.array([0, -1], np.float32), 16),
            versions=[VersionRun(32, 0, 0)],
            turns=[Turn(index=0, start=16, end=32, reward=1.0, terminated=True)],
        )
        return cls(msgspec.structs.replace(long, segments=[segment]))

    def records(self, attempts: Sequence[messages.Assignment]) -> list[bytes]:
        """Encode a record for each attempt."""
        return [
            encode(
                msgspec.structs.replace(
                    self._trajectory,
                    id=new_id(),
                    run=attempt.run,
                    group=attempt.group,
                    member=attempt.member,
                    episode=attempt.episode,
                    attempt=attempt.attempt,
                    task=attempt.task,
                )
            )
            for attempt in attempts
        ]


def submission_requests(
    attempts: Sequence[messages.Assignment], records: Sequence[bytes], together: int
) -> list[bytes]:
    """Encode HTTP requests with ``together`` records each."""
    requests = []
    for start in range(0, len(attempts), together):
        batch = records[start : start + together]
        heads = [
            messages.SubmissionHead(
                episode=item.episode, attempt=item.attempt, nonce=item.nonce, size_bytes=len(record)
            )
            for item, record in zip(attempts[start : start + together], batch, strict=True)
        ]
        text = msgspec.json.encode(heads)
        start_of_body = len(text).to_bytes(4, "little") + text
        body = start_of_body + bytes(-len(start_of_body) % ALIGNMENT) + b"".join(batch)
        head = (
            f"POST /v1/worker/submit?worker={WORKER} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {messages.RECORDS_MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    return requests


class _Connection:
    """A connection with one request at a time."""

    __slots__ = ("answer", "socket", "unsent")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.unsent: memoryview = memoryview(b"")
        self.answer = b""

    def send(self) -> bool:
        """Send as much as the socket takes; return True once everything is sent."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> bytes | None:
        """Read a part of the answer; return the answer's body once it is complete."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionError("the service closed the connection")
        self.answer += part
        head, end_of_head, body = self.answer.partition(b"\r\n\r\n")
        if not end_of_head or len(body) < _content_length(head):
            return None
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(self.answer.decode(errors="replace")[:2000])
        self.answer = b""
        return body


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line[:15].lower() == b"content-length:":
            return int(line[15:])
    raise ConnectionError(f"the answer has no Content-Length: {head!r}")


def send(port: int, requests: Sequence[bytes], connections: int) -> SendCost:
    """Send all requests over ``connections`` connections. Raises AssertionError for a record that is not accepted."""
    unsent = deque(requests)
    answers: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        open_connections = [_Connection(port) for _ in range(min(connections, len(requests)))]
        try:
            for connection in open_connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            started_at, cpu_before_s = time.perf_counter(), time.process_time()
            for connection in open_connections:
                _send_next(selector, connection, unsent)
            while len(answers) < len(requests):
                for key, mask in selector.select():
                    connection = key.data
                    if mask & selectors.EVENT_WRITE and connection.send():
                        selector.modify(connection.socket, selectors.EVENT_READ, connection)
                    if mask & selectors.EVENT_READ:
                        body = connection.receive()
                        if body is not None:
                            answers.append(body)
                            if unsent:
                                _send_next(selector, connection, unsent)
            cost = SendCost(time.perf_counter() - started_at, time.process_time() - cpu_before_s)
        finally:
            for connection in open_connections:
                connection.socket.close()
    for answer in answers:
        _require_accepted(json.loads(answer))
    return cost


def _send_next(selector: selectors.BaseSelector, connection: _Connection, unsent: deque[bytes]) -> None:
    connection.unsent = memoryview(unsent.popleft())
    if not connection.send():
        selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)


def _require_accepted(answer: dict[str, Any]) -> None:
    for result in answer["results"]:
        if result["verdict"] != "accepted":
            raise AssertionError(f"a record was not accepted: {result}")

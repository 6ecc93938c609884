"""Submissions made beforehand, sent over raw sockets: the client costs as little as it can.

* Every record is a valid trajectory of an attempt that the service leased; every verdict is read, and must be accepted.
* Requests are whole bytes before the clock starts; while it runs the client only sends and receives.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.bench_pull import long_trajectory, post
from headrace.trajectory import Trajectory, Turn, VersionRun
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT
from headrace.wire.codec import encode

WORKER = "bench"

ATTEMPT_LEASE_S = 3600.0
"""No attempt runs out while its record waits to be sent."""


class Sent(NamedTuple):
    """What sending took. ``cpu_s`` is the client's own."""

    wall_s: float
    cpu_s: float


def lease(url: str, count: int) -> list[messages.Assignment]:
    """That many attempts of whichever run has some."""
    attempts: list[messages.Assignment] = []
    while len(attempts) < count:
        free = min(count - len(attempts), 4096)
        request = messages.LeaseRequest(worker=WORKER, slots=count, free=free, wait_s=5)
        answer = post(f"{url}/v1/worker/lease", msgspec.json.encode(request))
        granted = msgspec.json.decode(answer, type=messages.LeaseReply).attempts
        assert granted, f"{len(attempts)} of {count} attempts were granted"
        attempts += granted
    return attempts


class Template:
    """Records of many attempts from one trajectory: only what names the attempt differs."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    @classmethod
    def long(cls, attempt: messages.Assignment) -> Template:
        """4,096 tokens: 37 KB."""
        return cls(long_trajectory(attempt, 0))

    @classmethod
    def short(cls, attempt: messages.Assignment) -> Template:
        """One turn of 16 tokens."""
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

    def record(self, attempt: messages.Assignment, id: str) -> bytes:
        return encode(
            msgspec.structs.replace(
                self._trajectory,
                id=id,
                run=attempt.run,
                group=attempt.group,
                member=attempt.member,
                episode=attempt.episode,
                attempt=attempt.attempt,
                task=attempt.task,
            )
        )


def requests_of(attempts: Sequence[messages.Assignment], records: Sequence[bytes], together: int) -> list[bytes]:
    """Whole HTTP requests, ``together`` records in each."""
    made = []
    for start in range(0, len(attempts), together):
        chosen = records[start : start + together]
        heads = [
            messages.SubmissionHead(
                episode=item.episode, attempt=item.attempt, nonce=item.nonce, size_bytes=len(record)
            )
            for item, record in zip(attempts[start : start + together], chosen, strict=True)
        ]
        text = msgspec.json.encode(heads)
        start_of_body = len(text).to_bytes(4, "little") + text
        body = start_of_body + bytes(-len(start_of_body) % ALIGNMENT) + b"".join(chosen)
        head = (
            f"POST /v1/worker/submit?worker={WORKER} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {messages.RECORDS_MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


class _Connection:
    """One connection: a request, its answer, the next request."""

    __slots__ = ("answer", "socket", "unsent")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.unsent: memoryview = memoryview(b"")
        self.answer = b""

    def send(self) -> bool:
        """Send what the socket takes; whether all of it is gone."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> bytes | None:
        """The answer's body once it is whole."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionError("the service closed the connection")
        self.answer += part
        head, found, body = self.answer.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return None
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(self.answer.decode(errors="replace")[:2000])
        self.answer = b""
        return body


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line[:15].lower() == b"content-length:":
            return int(line[15:])
    raise ConnectionError(f"an answer without a length: {head!r}")


def send(port: int, requests: Sequence[bytes], connections: int) -> Sent:
    """Send all requests over so many connections, one at a time on each. Raises where a record was not accepted."""
    waiting = deque(requests)
    answers: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        opened = [_Connection(port) for _ in range(min(connections, len(requests)))]
        try:
            for connection in opened:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            begun, cpu = time.perf_counter(), time.process_time()
            for connection in opened:
                _next(selector, connection, waiting)
            while len(answers) < len(requests):
                for key, mask in selector.select():
                    connection = key.data
                    if mask & selectors.EVENT_WRITE and connection.send():
                        selector.modify(connection.socket, selectors.EVENT_READ, connection)
                    if mask & selectors.EVENT_READ:
                        body = connection.receive()
                        if body is not None:
                            answers.append(body)
                            if waiting:
                                _next(selector, connection, waiting)
            spent = Sent(time.perf_counter() - begun, time.process_time() - cpu)
        finally:
            for connection in opened:
                connection.socket.close()
    for answer in answers:
        _require_accepted(json.loads(answer))
    return spent


def _next(selector: selectors.BaseSelector, connection: _Connection, waiting: deque[bytes]) -> None:
    connection.unsent = memoryview(waiting.popleft())
    if not connection.send():
        selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)


def _require_accepted(answer: dict[str, Any]) -> None:
    for result in answer["results"]:
        if result["verdict"] != "accepted":
            raise AssertionError(f"a record was not accepted: {result}")

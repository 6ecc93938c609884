"""A worker made of plain requests, with which a test holds, drops and ends attempts."""

from __future__ import annotations

import urllib.request
from typing import Any

import msgspec

from headrace.trajectory import Trajectory
from headrace.wire import messages
from tests.orchestrator.serving import submission

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def request_json(method: str, url: str, body: Any = None) -> Any:
    """Send a request; returns the decoded JSON of the response. Raises HTTPError."""
    content = request_bytes(method, url, body)
    return msgspec.json.decode(content) if content else None


def request_bytes(method: str, url: str, body: Any = None) -> bytes:
    """Send a request; returns the body of the response. Raises HTTPError."""
    data = body if isinstance(body, bytes) else None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with _open(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


class HttpWorker:
    """The worker ``name`` of a pool, for an orchestrator at ``url``."""

    def __init__(self, url: str, name: str, pool: str) -> None:
        self._url, self.name, self._pool = url, name, pool

    def lease(self, count: int) -> list[messages.Assignment]:
        """Lease exactly ``count`` attempts."""
        request = {"worker": self.name, "pool": self._pool, "slots": 8, "free": count, "wait_s": 10}
        reply = msgspec.convert(request_json("POST", f"{self._url}/v1/worker/lease", request), messages.LeaseReply)
        assert len(reply.attempts) == count, reply
        return reply.attempts

    def heartbeat(self, *attempts: messages.Assignment) -> list[messages.Cancel]:
        """Send a heartbeat that lists these attempts; returns those that are cancelled."""
        request = {"worker": self.name, "pool": self._pool, "slots": 8, "holding": _keys(*attempts)}
        reply = request_json("POST", f"{self._url}/v1/worker/heartbeat", request)
        return msgspec.convert(reply, messages.HeartbeatReply).cancels

    def submit(self, attempt: messages.Assignment, record: Trajectory) -> None:
        """Submit a record, which must be accepted."""
        body = submission([(attempt, record)])
        (result,) = request_json("POST", f"{self._url}/v1/worker/submit?worker={self.name}", body)["results"]
        assert result["verdict"] == "accepted", result

    def give_back(self, *attempts: messages.Assignment) -> None:
        """Return unfinished attempts."""
        request_json("POST", f"{self._url}/v1/worker/return", {"worker": self.name, "attempts": _keys(*attempts)})


def _keys(*attempts: messages.Assignment) -> list[tuple[str, int, str]]:
    return [(attempt.episode, attempt.attempt, attempt.nonce) for attempt in attempts]

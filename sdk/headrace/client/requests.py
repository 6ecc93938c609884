"""What the clients ask and how answers are read. No sockets here: both clients share it whole.

* Errors of the service come back as their own class.
* A proxy's page becomes an error with status, media type and wait.
* A page with a good status is no decoding error.
* An answer of an older epoch is refused and asked for again.

An *operation* is a generator: it yields an ``ApiRequest`` and is sent an ``ApiResponse`` or a ``TransportFailure``, or
yields a ``Sleep``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from headrace.errors import HeadraceError, RequestError, RequestTooLarge, ServiceError, Unavailable
from headrace.http.problems import GATEWAY_STATUSES, read_problem
from headrace.wire import messages

T = TypeVar("T")

_HEAD_CHARS = 120
"""So much of a foreign body is quoted: enough to see which proxy it was."""


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """One HTTP request. ``wait_s`` is the wait that it asks the server for; the read timeout goes beyond it."""

    method: str
    target: str
    body: bytes = b""
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ApiResponse:
    """One HTTP answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: memoryview

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def epoch(self) -> int | None:
        text = self.headers.get(messages.HEADER_EPOCH.lower(), "")
        return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True, kw_only=True)
class TransportFailure:
    """No answer came. ``sent``: the service may have carried the request out all the same."""

    detail: str
    sent: bool


@dataclass(frozen=True)
class Sleep:
    """Let time pass before the next request."""

    seconds: float


Operation = Generator[ApiRequest | Sleep, ApiResponse | TransportFailure | None, T]
"""What a driver runs: it answers each ``ApiRequest``, and sends None after each ``Sleep``."""


@dataclass(frozen=True, kw_only=True)
class ApiCall(Generic[T]):
    """A request and how its answer reads. ``repeatable``: doing it twice is the same as doing it once.
    ``rebuild`` makes a long poll again with another wait."""

    request: ApiRequest
    read: Callable[[ApiResponse], T]
    repeatable: bool = True
    rebuild: Callable[[float], ApiRequest] | None = None

    def waiting(self, wait_s: float) -> ApiCall[T]:
        """The same long poll with another wait."""
        return self if self.rebuild is None else replace(self, request=self.rebuild(wait_s))


def request(
    method: str,
    *parts: str,
    body: msgspec.Struct | Any = None,
    query: Mapping[str, Any] | None = None,
    wait_s: float = 0.0,
) -> ApiRequest:
    """A request for ``/v1/<parts>``; parts are quoted, query entries that are None are left out."""
    target = "/".join((messages.API, *(quote(part, safe="") for part in parts)))
    given = {name: value for name, value in (query or {}).items() if value is not None}
    if given:
        target += "?" + urlencode(given)
    return ApiRequest(
        method=method, target=target, body=b"" if body is None else msgspec.json.encode(body), wait_s=wait_s
    )


def json_reader(kind: type[T]) -> Callable[[ApiResponse], T]:
    """Reads a JSON body as that type. Raises ServiceError where the body is something else."""

    def read(answer: ApiResponse) -> T:
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise unexpected_body(answer, f"a {getattr(kind, '__name__', kind)} as JSON ({error})") from error

    return read


def unexpected_body(answer: ApiResponse, wanted: str) -> ServiceError:
    """The error for a good status with a body that nobody asked for."""
    return ServiceError(
        f"The answer ({answer.status}, {answer.media_type or 'no media type'}) is not {wanted}.",
        hint="Is the address that of an orchestrator, and do both sides have the same release? A proxy may have "
        f"answered in its place. It begins: {_head(answer)!r}",
        http_status=answer.status,
        media_type=answer.media_type,
    )


def check_response(request: ApiRequest, answer: ApiResponse | TransportFailure, *, newest_epoch: int) -> ApiResponse:
    """The answer, if it is a good one; otherwise raises what it stands for.

    ``Unavailable`` has ``extra["outcome"]``: ``"not-done"`` or ``"unknown"`` (it may have been carried out).
    """
    if isinstance(answer, TransportFailure):
        raise Unavailable(
            f"No answer from the orchestrator to {request.method} {request.target}: {answer.detail}.",
            hint="Is it running, and is the address right? `headrace doctor` checks it.",
            outcome="unknown" if answer.sent else "not-done",
        )
    if answer.epoch is not None and answer.epoch < newest_epoch:
        # A paused older orchestrator woke up. It no longer owns the data directory, so what it says does not count.
        raise Unavailable(
            f"The answer is of an older orchestrator: epoch {answer.epoch}, but epoch {newest_epoch} was seen.",
            hint="Two orchestrators answer at this address; stop the older one.",
            outcome="not-done",
        )
    if answer.status < 300:
        return answer
    raise _problem(answer) or _foreign(request, answer)


def _problem(answer: ApiResponse) -> HeadraceError | None:
    """The orchestrator's own error, or None where the body is not one of its problem bodies."""
    error = read_problem(answer.status, answer.body)
    if isinstance(error, Unavailable):
        error.extra.setdefault("outcome", "not-done")
    return error


def _foreign(request: ApiRequest, answer: ApiResponse) -> HeadraceError:
    """An error that the orchestrator did not write: a proxy's page, most of the time."""
    facts: dict[str, Any] = {
        "http_status": answer.status,
        "media_type": answer.media_type,
        "wait_s": request.wait_s,
        "server": answer.headers.get("server", ""),
    }
    seen = f"{answer.status} ({answer.media_type or 'no media type'})"
    said = f"It begins: {_head(answer)!r}"
    if answer.status == 413:
        return RequestTooLarge(
            f"A proxy refused a body of {len(request.body)} bytes with {seen}.",
            hint="Raise its body limit (nginx: client_max_body_size) to the orchestrator's max_body_bytes. " + said,
            **facts,
        )
    if answer.status in GATEWAY_STATUSES:
        return Unavailable(
            f"A proxy answered {seen} in place of the orchestrator; the request had wait_s = {request.wait_s:g}.",
            hint="Give the proxy a read timeout well above the wait, or the client a shorter poll_s. " + said,
            outcome="unknown",
            **facts,
        )
    kind = RequestError if answer.status < 500 else ServiceError
    return kind(
        f"{request.method} {request.target} was answered {seen}, which is no answer of an orchestrator.",
        hint="Is the address right, and is a proxy in between? " + said,
        **facts,
    )


def _head(answer: ApiResponse) -> str:
    return bytes(answer.body[: 4 * _HEAD_CHARS]).decode("utf-8", "replace")[:_HEAD_CHARS]


def request_headers(token: str, request: ApiRequest) -> dict[str, str]:
    """Headers of every request. No compression: batches hold float arrays, and views need the plain bytes."""
    found = {"Accept-Encoding": "identity", "User-Agent": "headrace"}
    if token:
        found["Authorization"] = f"Bearer {token}"
    if request.body:
        found["Content-Type"] = "application/json"
    return found

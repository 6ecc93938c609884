"""Requests and responses, without sockets: both clients share them.

* An error of the service is raised as its own class.
* A proxy's page becomes an error with status, media type and wait.
* A page with a success status raises ``ServiceError``, not a decoding error.
* A response with an older epoch is refused, and the request repeated.

An *operation* is a generator: it yields an ``ApiRequest`` and is sent an ``ApiResponse`` or a ``TransportFailure``, or
yields a ``Sleep`` or ``FileWork``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, RequestError, RequestTooLarge, ServiceError, Unavailable
from headrace.http.problems import GATEWAY_STATUSES, read_problem
from headrace.wire import messages

T = TypeVar("T")

_HEAD_CHARS = 120
"""Characters of a foreign body that an error quotes: enough to recognize the proxy."""


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """An HTTP request. ``wait_s`` is the long poll that it asks for; the read timeout is added to it, which
    ``read_timeout_s`` replaces."""

    method: str
    target: str
    body: bytes = b""
    wait_s: float = 0.0
    read_timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ApiResponse:
    """An HTTP response. Header names are in lower case."""

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
    """A request without a response. ``sent``: the service may have carried it out nevertheless."""

    detail: str
    sent: bool


@dataclass(frozen=True)
class Sleep:
    """A pause before the next request."""

    seconds: float


@dataclass(frozen=True)
class FileWork:
    """A call that reads files, and stores its result itself. An async client makes it in a thread."""

    call: Callable[[], None]


Operation = Generator[ApiRequest | Sleep | FileWork, ApiResponse | TransportFailure | None, T]
"""A generator that a client runs; it is sent the response to each ``ApiRequest``, and None after other steps."""


def run_operation(
    operation: Operation[T],
    send: Callable[[ApiRequest], ApiResponse | TransportFailure],
    sleep: Callable[[float], None],
) -> T:
    """Run an operation to its end over blocking sockets. Its errors pass through."""
    response: ApiResponse | TransportFailure | None = None
    try:
        while True:
            step = operation.send(response)
            if isinstance(step, Sleep):
                response = None
                sleep(step.seconds)
            elif isinstance(step, FileWork):
                response = None
                step.call()
            else:
                response = send(step)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        operation.close()


@dataclass(frozen=True, kw_only=True)
class ApiCall(Generic[T]):
    """A request and the reader of its response.

    The request is safe to repeat. ``key``: the client-made key by which the service recognizes a repeat, if the request
    has one. ``rebuild`` makes a long poll again with another wait.
    """

    request: ApiRequest
    read: Callable[[ApiResponse], T]
    key: str = ""
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
    """A request for ``/v1/<parts>``. Parts are quoted, and query entries that are None are omitted."""
    for part in parts:
        if not isinstance(part, str) or not part:
            raise InvalidRequest(
                f"A name or id in the request is {part!r}.", hint="Pass the name of a run, or an id, as a text."
            )
    target = "/".join((messages.API, *(quote(part, safe="") for part in parts)))
    present = {name: value for name, value in (query or {}).items() if value is not None}
    if present:
        target += "?" + urlencode(present)
    return ApiRequest(
        method=method, target=target, body=b"" if body is None else msgspec.json.encode(body), wait_s=wait_s
    )


def json_reader(kind: type[T]) -> Callable[[ApiResponse], T]:
    """A reader of JSON bodies of that type. It raises ServiceError for any other body."""

    def read(response: ApiResponse) -> T:
        try:
            return msgspec.json.decode(response.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise unexpected_body(response, f"a {getattr(kind, '__name__', kind)} as JSON ({error})") from error

    return read


def unexpected_body(response: ApiResponse, expected: str) -> ServiceError:
    """The error for a success status with an unexpected body."""
    return ServiceError(
        f"The response ({response.status}, {response.media_type or 'no media type'}) is not {expected}.",
        hint="Is this the address of an orchestrator, and do both sides run the same release? A proxy may have "
        f"responded in its place. The body begins: {_body_start(response)!r}",
        http_status=response.status,
        media_type=response.media_type,
    )


def check_response(request: ApiRequest, response: ApiResponse | TransportFailure, *, newest_epoch: int) -> ApiResponse:
    """The response if it is a success, else raise its error.

    ``Unavailable`` has ``extra["outcome"]``: ``"not-done"``, or ``"unknown"`` if the request may have been carried out.
    """
    if isinstance(response, TransportFailure):
        raise Unavailable(
            f"No response from the orchestrator to {request.method} {request.target}: {response.detail}.",
            hint="Is it running, and is the address correct? `headrace doctor` checks it.",
            outcome="unknown" if response.sent else "not-done",
        )
    if response.epoch is not None and response.epoch < newest_epoch:
        # An older orchestrator was paused and resumed. It no longer owns the data directory, so its response is void.
        raise Unavailable(
            f"The response is from an older orchestrator: epoch {response.epoch}, the newest is epoch {newest_epoch}.",
            hint="Two orchestrators respond at this address; stop the older one.",
            outcome="not-done",
        )
    if response.status < 300:
        return response
    raise _problem(response) or _foreign_error(request, response)


def _problem(response: ApiResponse) -> HeadraceError | None:
    """The orchestrator's error, or None if the body is not one of its problem bodies."""
    error = read_problem(response.status, response.body)
    if isinstance(error, Unavailable):
        error.extra.setdefault("outcome", "not-done")
    return error


def _foreign_error(request: ApiRequest, response: ApiResponse) -> HeadraceError:
    """The error for a response that the orchestrator did not write; usually it is a proxy's page."""
    extra: dict[str, Any] = {
        "http_status": response.status,
        "media_type": response.media_type,
        "wait_s": request.wait_s,
        "server": response.headers.get("server", ""),
    }
    received = f"{response.status} ({response.media_type or 'no media type'})"
    start = f"The body begins: {_body_start(response)!r}"
    if response.status == 413:
        return RequestTooLarge(
            f"A proxy refused a body of {len(request.body)} bytes with {received}.",
            hint="Raise its body limit (nginx: client_max_body_size) to the orchestrator's max_body_bytes. " + start,
            **extra,
        )
    if response.status in GATEWAY_STATUSES:
        return Unavailable(
            f"A proxy responded {received} in place of the orchestrator; the request had wait_s = {request.wait_s:g}.",
            hint="Give the proxy a read timeout well above the wait, or the client a shorter poll_s. " + start,
            outcome="unknown",
            **extra,
        )
    kind = RequestError if response.status < 500 else ServiceError
    return kind(
        f"The response to {request.method} {request.target} was {received}, not one of an orchestrator.",
        hint="Is the address correct, and is a proxy in between? " + start,
        **extra,
    )


def _body_start(response: ApiResponse) -> str:
    return bytes(response.body[: 4 * _HEAD_CHARS]).decode("utf-8", "replace")[:_HEAD_CHARS]


def request_headers(token: str, request: ApiRequest) -> dict[str, str]:
    """Headers of every request. Responses are not compressed, because batches are read as views of the body."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "headrace"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if request.body:
        headers["Content-Type"] = "application/json"
    return headers

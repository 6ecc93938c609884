"""Requests and responses as handlers use them.

* A body over the limit is refused before it is read whole.
* The error of a malformed body names the field that is wrong.
* Names are printable, not empty and bounded, and numbers fit 64 bits: everything that is read can be stored.
* A handler can wait for the client to disconnect.
* A long poll waits no longer than the limit, and its response names the wait that was granted.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.bounds import MAX_REFERENCE, require_text
from headrace.errors import InvalidRequest, RequestTooLarge
from headrace.server.uvicorn_protocol import BodyParts
from headrace.wire.messages import HEADER_EPOCH, Weights
from headrace_orchestrator.api.browser_sessions import Browser
from headrace_orchestrator.service.callbacks import StoredCallback
from headrace_orchestrator.service.waiters import ClientDisconnected

T = TypeVar("T")
D = TypeVar("D")

Header = tuple[bytes, bytes]

_EPOCH = HEADER_EPOCH.lower().encode()


@dataclass(slots=True)  # not frozen: each request makes one, and a frozen one takes longer to make
class HttpResponse:
    """The response of a handler. ``body`` is sent as it is; a stream of tuples needs its ``length``."""

    body: bytes | AsyncIterator[bytes] | AsyncIterator[tuple[bytes | memoryview, ...]]
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


class HttpRequest:
    """A request, with the parameters of its path and the fields of its query."""

    __slots__ = ("_disconnected", "_max_wait_s", "_receive", "body", "browser", "granted_s", "params", "query")

    def __init__(
        self,
        params: Mapping[str, str],
        query_string: bytes,
        body: bytes,
        receive: Receive,
        max_wait_s: float,
        browser: Browser | None = None,
    ) -> None:
        self.params = params
        self.query = _parse_query(query_string)
        self.body = body
        self.browser = browser
        """The client, for handlers of pages."""
        self._receive = receive
        self._max_wait_s = max_wait_s
        self.granted_s: float | None = None
        """Longest wait of this long poll in seconds; None for any other request."""
        self._disconnected: asyncio.Task[None] | None = None

    def read(self, kind: type[T]) -> T:
        """Decode the JSON body as that type. Raises InvalidRequest, which names the wrong field."""
        try:
            value = msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"The body is not a valid {kind.__name__}: {error}.", hint="/docs shows its schema."
            ) from error
        if isinstance(value, msgspec.Struct):
            _require_storable(value)
        return value

    def number(self, name: str, default: D, kind: Callable[[str], T]) -> T | D:
        """A number from the query. Raises InvalidRequest for anything else."""
        text = self.query.get(name)
        if text is None:
            return default
        try:
            return kind(text)
        except ValueError as error:
            raise InvalidRequest(f"{name}={text!r} is not a number.", hint="/docs shows the query fields.") from error

    def wait_s(self) -> float:
        """Seconds that this long poll waits: the query field ``wait_s``, up to the limit."""
        wait_s = self.number("wait_s", 0.0, float)
        if not math.isfinite(wait_s) or wait_s < 0:
            raise InvalidRequest(f"wait_s={wait_s} is not a duration.", hint="Give seconds, 0 or more.")
        return self.grant(wait_s)

    def grant(self, wait_s: float) -> float:
        """Shorten a wait to the limit, and note it for the response."""
        self.granted_s = min(max(0.0, wait_s), self._max_wait_s)
        return self.granted_s

    def disconnected(self) -> asyncio.Task[None]:
        """A task that is done when the client has closed the connection."""
        if self._disconnected is None:
            self._disconnected = asyncio.create_task(self._wait_for_disconnect())
        return self._disconnected

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stop waiting for the client to disconnect."""
        if self._disconnected is not None:
            self._disconnected.cancel()


@functools.lru_cache(maxsize=1024)
def _parse_query(text: bytes) -> Mapping[str, str]:
    """Parse the fields of a query; a worker sends the same one thousands of times a second."""
    return MappingProxyType(dict(parse_qsl(text.decode("latin-1"))))


MAX_NAME = 200
"""Most characters of a name: enough for a host, a process and a random part."""

NAME_FIELDS = ("worker", "pool", "learner", "session", "request")


def require_name(field: str, name: str) -> None:
    """Raise InvalidRequest unless the name is printable, not empty, and at most ``MAX_NAME`` characters long."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        shown = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
        raise InvalidRequest(
            f"The field {field} is {shown!r}, which is not a valid name.",
            hint=f"A name has 1 to {MAX_NAME} printable characters.",
        )


def _require_storable(value: msgspec.Struct) -> None:
    """Raise InvalidRequest where a field could not be stored."""
    for name in NAME_FIELDS:
        text = getattr(value, name, None)
        if isinstance(text, str):
            require_name(name, text)
    weights = getattr(value, "weights", None)
    if isinstance(weights, Weights):
        _require_path("weights.path", weights.path)
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        field = _unstorable(msgspec.to_builtins(value)) if isinstance(error, OverflowError) else ""
        raise InvalidRequest(
            f"The body cannot be stored: {field or 'it'} "
            + ("is a number beyond 64 bits." if field else "is nested too deeply."),
            hint="/docs shows its schema.",
        ) from error


def _require_path(field: str, path: str) -> None:
    try:
        require_text(path, most=MAX_REFERENCE)
    except ValueError as error:
        raise InvalidRequest(f"The field {field} is not valid: {error}.", hint="Give the path of a folder.") from error


def _unstorable(value: Any, path: str = "") -> str:
    """The path of a number beyond 64 bits in a tree of builtins; empty without one."""
    if isinstance(value, int):
        return path if not -(1 << 63) <= value < 1 << 64 else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    paths = (_unstorable(item, f"{path}.{key}" if path else str(key)) for key, item in items)
    return next(filter(None, paths), "")


async def read_body(receive: Receive, declared: str, limit: int) -> bytes:
    """Read the whole body. Raises RequestTooLarge above ``limit`` bytes, ClientDisconnected if it never ends."""
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > limit:
            raise too_large(limit)
        more = message.get("more_body", False)
    return b"".join(parts)  # does not copy a single part


def too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"The body is larger than {limit} bytes, the most that this orchestrator reads.",
        hint="Send less at a time. Where a route takes a body, the orchestrator's setting max_body_bytes is the limit.",
        limit_bytes=limit,
        setting="max_body_bytes",
    )


async def send_response(send: Send, response: HttpResponse, epoch: int) -> None:
    """Send a response, with the epoch in a header."""
    body = response.body
    length = len(body) if isinstance(body, bytes) else response.length
    headers: list[Header] = [
        (b"content-type", response.media_type.encode()),
        (_EPOCH, b"%d" % epoch),
        *((name.lower().encode(), value.encode("latin-1")) for name, value in response.headers.items()),
    ]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if isinstance(body, bytes):
        await send({"type": "http.response.body", "body": body})
        return
    async for part in body:
        piece = part if isinstance(part, bytes) else BodyParts(part)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def response_head(response: HttpResponse, body: bytes, epoch: int) -> bytes:
    """All header lines of a response with that body. Raises ValueError for a header that would break its line."""
    head = _plain_head(response.media_type, epoch, len(body))
    for name, value in response.headers.items():
        if not (name + value).isprintable():
            raise ValueError(f"the header {name!r} cannot be {value!r}")
        head += f"{name.lower()}: {value}\r\n".encode("latin-1")
    return head


@functools.lru_cache(maxsize=64)
def _plain_head(media_type: str, epoch: int, length: int) -> bytes:
    """The header lines that every response has; most responses are of a few lengths."""
    return b"content-type: %s\r\n%s: %d\r\ncontent-length: %d\r\n" % (media_type.encode(), _EPOCH, epoch, length)


def headers_of(scope: Scope) -> Callable[[bytes], str]:
    """A function that returns the first request header of a lower-case name, or an empty string."""
    first: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    return lambda name: str(first.get(name, b""), "latin-1")


Handler = Callable[[Any, HttpRequest], Awaitable[HttpResponse | msgspec.Struct]]
"""A function of the service and the request. A struct becomes a JSON response."""

DirectHandler = Callable[[Any, HttpRequest, StoredCallback[Any]], None]
"""A function of the service, the request, and the callback that gets the struct for the JSON response. May raise."""

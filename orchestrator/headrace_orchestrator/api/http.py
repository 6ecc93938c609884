"""Requests and answers as handlers see them.

* A body over the limit is refused before it is read whole.
* Malformed JSON names the field that is wrong.
* Names are printable, not empty and bounded; numbers fit 64 bits: whatever is read can be stored.
* Whether the client is still there can be awaited.
* A long poll waits no longer than the bound, and its answer says how long that was.
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

from headrace.errors import InvalidRequest, RequestTooLarge
from headrace.wire.messages import HEADER_EPOCH
from headrace_orchestrator.api.answering import WHOLE
from headrace_orchestrator.api.gathering import Pieces
from headrace_orchestrator.service.callbacks import StoredCallback
from headrace_orchestrator.service.waiters import ClientGone

T = TypeVar("T")
D = TypeVar("D")

Header = tuple[bytes, bytes]

_EPOCH = HEADER_EPOCH.lower().encode()


@dataclass(frozen=True)
class Answer:
    """What a handler returns. ``body`` is sent as it is; a stream of tuples needs its ``length``."""

    body: bytes | AsyncIterator[bytes] | AsyncIterator[tuple[bytes | memoryview, ...]]
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


class Call:
    """One request. ``params`` are the path's, ``query`` the address's."""

    __slots__ = ("_left", "_max_wait_s", "_receive", "body", "granted_s", "params", "query")

    def __init__(
        self, params: Mapping[str, str], query_string: bytes, body: bytes, receive: Receive, max_wait_s: float
    ) -> None:
        self.params = params
        self.query = _query(query_string)
        self.body = body
        self._receive = receive
        self._max_wait_s = max_wait_s
        self.granted_s: float | None = None
        """Seconds that this long poll waits at most; None if it is none."""
        self._left: asyncio.Task[None] | None = None

    def read(self, kind: type[T]) -> T:
        """The JSON body as that type. Raises InvalidRequest that names the field."""
        try:
            value = msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"The body is not a valid {kind.__name__}: {error}.", hint="/docs shows what it must look like."
            ) from error
        if isinstance(value, msgspec.Struct):
            _require_storable(value)
        return value

    def number(self, name: str, default: D, kind: Callable[[str], T]) -> T | D:
        """A number from the query. Raises InvalidRequest if it is none."""
        text = self.query.get(name)
        if text is None:
            return default
        try:
            return kind(text)
        except ValueError as error:
            raise InvalidRequest(f"{name}={text!r} is not a number.", hint="/docs shows the query fields.") from error

    def wait_s(self) -> float:
        """How long this long poll waits, in seconds: what its address asks for, up to the bound."""
        wait_s = self.number("wait_s", 0.0, float)
        if not math.isfinite(wait_s) or wait_s < 0:
            raise InvalidRequest(f"wait_s={wait_s} is not a duration.", hint="Give seconds, 0 or more.")
        return self.grant(wait_s)

    def grant(self, wait_s: float) -> float:
        """Shorten a wait to the bound; the answer says what it came to."""
        self.granted_s = min(max(0.0, wait_s), self._max_wait_s)
        return self.granted_s

    def left(self) -> asyncio.Task[None]:
        """Done when the client has closed the connection."""
        if self._left is None:
            self._left = asyncio.create_task(self._watch())
        return self._left

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """The request is over."""
        if self._left is not None:
            self._left.cancel()


@functools.lru_cache(maxsize=1024)
def _query(text: bytes) -> Mapping[str, str]:
    """The fields of a query; a worker sends the same one thousands of times a second."""
    return MappingProxyType(dict(parse_qsl(text.decode("latin-1"))))


MAX_NAME = 200
"""Characters of a name: enough for a host, a process and a random part."""

NAME_FIELDS = ("worker", "pool", "learner", "session", "request")


def require_name(field: str, name: str) -> None:
    """Raises InvalidRequest unless the name is printable, not empty, and at most ``MAX_NAME`` characters long."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        shown = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
        raise InvalidRequest(
            f"The field {field} is {shown!r}, which is no name.",
            hint=f"A name has 1 to {MAX_NAME} characters that can be printed.",
        )


def _require_storable(value: msgspec.Struct) -> None:
    """Raises InvalidRequest that names a field which could not be stored."""
    for name in NAME_FIELDS:
        given = getattr(value, name, None)
        if isinstance(given, str):
            require_name(name, given)
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        field = _unstorable(msgspec.to_builtins(value)) if isinstance(error, OverflowError) else ""
        raise InvalidRequest(
            f"The body cannot be stored: {field or 'it'} "
            + ("is a number beyond 64 bits." if field else "is nested too deep."),
            hint="/docs shows what it must look like.",
        ) from error


def _unstorable(value: Any, path: str = "") -> str:
    """Where in a tree of builtins a number is beyond 64 bits; empty if none is."""
    if isinstance(value, int):
        return path if not -(1 << 63) <= value < 1 << 64 else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found = (_unstorable(item, f"{path}.{key}" if path else str(key)) for key, item in items)
    return next(filter(None, found), "")


async def read_body(receive: Receive, declared: str, limit: int) -> bytes:
    """The whole body. Raises RequestTooLarge above ``limit`` bytes, ClientGone if it never ends."""
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.disconnect":
        raise ClientGone
    if not message.get("more_body"):
        if len(body) > limit:
            raise too_large(limit)
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
    return b"".join(parts)


def too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"The body is larger than {limit} bytes, the most that this orchestrator reads.",
        hint="Send less at a time, or raise the orchestrator's setting max_body_bytes.",
        limit_bytes=limit,
        setting="max_body_bytes",
    )


async def send_answer(scope: Scope, send: Send, answer: Answer, epoch: int) -> None:
    """Send it, with the epoch in a header."""
    body = answer.body
    if isinstance(body, bytes) and WHOLE in scope.get("extensions", ()):
        await send({"type": WHOLE, "status": answer.status, "head": whole_head(answer, body, epoch), "body": body})
        return
    length = len(body) if isinstance(body, bytes) else answer.length
    headers: list[Header] = [
        (b"content-type", answer.media_type.encode()),
        (_EPOCH, b"%d" % epoch),
        *((name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers.items()),
    ]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if isinstance(body, bytes):
        await send({"type": "http.response.body", "body": body})
        return
    async for part in body:
        piece = part if isinstance(part, bytes) else Pieces(part)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def whole_head(answer: Answer, body: bytes, epoch: int) -> bytes:
    """The lines of all headers of an answer with that body. Raises ValueError for one that would break its line."""
    head = _plain_head(answer.media_type, epoch, len(body))
    for name, value in answer.headers.items():
        if not (name + value).isprintable():
            raise ValueError(f"the header {name!r} cannot be {value!r}")
        head += f"{name.lower()}: {value}\r\n".encode("latin-1")
    return head


@functools.lru_cache(maxsize=64)
def _plain_head(media_type: str, epoch: int, length: int) -> bytes:
    """The headers that every answer has; most answers are of a few lengths."""
    return b"content-type: %s\r\n%s: %d\r\ncontent-length: %d\r\n" % (media_type.encode(), _EPOCH, epoch, length)


def headers_of(scope: Scope) -> Callable[[bytes], str]:
    """A function that gives a request header, the first of that name (in small letters), or the empty string."""
    first: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    return lambda name: str(first.get(name, b""), "latin-1")


Handler = Callable[[Any, Call], Awaitable[Answer | msgspec.Struct]]
"""Takes the service and the request; a struct is answered as JSON."""

DirectHandler = Callable[[Any, Call, StoredCallback[Any]], None]
"""Takes the service, the request, and the callback that gets the struct to answer as JSON. May raise as well."""

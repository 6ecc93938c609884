"""uvicorn's HTTP protocol, with small answers in one step.

* An answer that is there whole is sent by one message, an extension of ASGI that the scope tells of.
* It goes out in one write, behind the answers of earlier requests of its connection.
* A HEAD request gets no body, and a client that goes is told that the connection ends.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

WHOLE = "headrace.response.whole"
"""The extension, and the type of its message: ``status``; ``head``, the lines of all headers; ``body``."""

_EXTENSIONS: dict[str, dict[object, object]] = {WHOLE: {}}


class AnsweringProtocol(HttpToolsProtocol):
    """uvicorn takes an answer in two messages, and checks each header of it anew."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope["extensions"] = _EXTENSIONS
        super()._start_asgi_task(cycle, functools.partial(_call, cycle, app))


def _call(cycle: RequestResponseCycle, app: ASGIApp, scope: Any, receive: Any, send: Any) -> Any:
    return app(scope, receive, functools.partial(_send, cycle))


async def _send(cycle: RequestResponseCycle, message: Message) -> None:
    if message["type"] != WHOLE:
        await cycle.send(message)  # type: ignore[arg-type]  # the same messages, by another name
        return
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    _write(cycle, message["status"], message["head"], message["body"])


def answer(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    """Send an answer that is there whole, now; behind what its client is to read first, if it does not read. It ends a
    request that has no task."""
    if cycle.flow.write_paused and not cycle.disconnected:
        cycle.late = asyncio.create_task(_late(cycle, status, head, body))  # type: ignore[attr-defined]  # to keep it
        return
    _write_last(cycle, status, head, body)


async def _late(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    await cycle.flow.drain()
    _write_last(cycle, status, head, body)


def _write_last(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    _write(cycle, status, head, body)
    cycle.on_response = _nothing  # else it keeps its connection, which keeps it


def _nothing() -> None:
    """What a request that is over does when it is answered."""


def _write(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> None:
    if cycle.disconnected:
        return
    parts = [STATUS_LINE[status]]
    for name, value in cycle.default_headers:
        parts += name, b": ", value, b"\r\n"
    parts.append(head)
    parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
    if cycle.scope["method"] != "HEAD":
        parts.append(body)
    cycle.transport.write_whole(b"".join(parts))  # type: ignore[attr-defined]  # of the gathering transport
    cycle.waiting_for_100_continue = False
    cycle.response_started = cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()

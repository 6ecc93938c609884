"""uvicorn's HTTP protocol, without a task for requests that need none.

* A request that its application takes directly is handed over when its body is whole, and answered when that says so.
* One that asks whether to send its body goes the way of all requests; so does what the application does not take.
* Requests of a connection are answered one after the other, in their order.
* Nothing of a request is kept once it is answered.
* A client that leaves in the middle of its body is treated as any other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace_orchestrator.api.answering import answer

SMALL_BYTES = HIGH_WATER_LIMIT
"""Of a longer body uvicorn reads no more than this before somebody asks for it."""

Reply = Callable[[int, bytes, bytes], None]
"""Takes status, header lines and body of an answer. To be called once, and not before the request was handed over."""

Direct = Callable[[bytes, Reply], None]
"""Takes a request's body and what sends its answer. Raises nothing."""


class _Held(NamedTuple):
    """A request whose body is not whole yet."""

    cycle: RequestResponseCycle
    app: Any
    direct: Direct


class DirectProtocol(HttpToolsProtocol):
    """uvicorn makes a task of each request. An application may have ``direct(scope)``, which gives what takes that
    request, whose body has at most ``SMALL_BYTES``; or None."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held: _Held | None = None
        super().connection_made(transport)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        held, self._held = self._held, None
        if held is not None:
            super()._start_asgi_task(held.cycle, held.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        choose = getattr(app, "direct", None)
        direct = None if choose is None or cycle.waiting_for_100_continue else choose(cycle.scope)
        if direct is None:
            super()._start_asgi_task(cycle, app)
            return
        self._held = _Held(cycle, app, direct)
        self._hand_over_if_whole()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._hand_over_if_whole()

    def _hand_over_if_whole(self) -> None:
        held = self._held
        if held is not None and not held.cycle.more_body:
            self._held = None
            body, held.cycle.body = bytes(held.cycle.body), bytearray()
            held.direct(body, functools.partial(answer, held.cycle))

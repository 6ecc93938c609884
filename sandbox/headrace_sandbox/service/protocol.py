"""uvicorn's HTTP protocol, which tells who waits for an answer that its client hung up.

* Whoever asks for it (``HUNG_UP`` among the extensions of a request's scope) is called when the client hangs up.
* A client that is too slow is disconnected (``headrace.server.request_timeouts``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.process import KEEP_ALIVE_S
from headrace.server.request_timeouts import RequestTimeouts

REQUEST_TIMEOUT_S = 120.0
"""Seconds for a request to be here whole, from its first byte. The largest body that is read by default comes in time
at 0.6 MB/s."""

HUNG_UP = "headrace.hung_up"
"""What is called when the client of a request hangs up: a list, to which may be added. A task that waits for
``http.disconnect`` would cost each request more."""


class Protocol(RequestTimeouts, HttpToolsProtocol):
    """HTTP as the service speaks it."""

    idle_timeout_s, request_timeout_s = KEEP_ALIVE_S, REQUEST_TIMEOUT_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._hung_up: list[Callable[[], object]] = []

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {HUNG_UP: self._hung_up}
        self.scope["extensions"] = extensions

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for call in self._hung_up:
            call()

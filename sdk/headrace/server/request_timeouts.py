"""Timeouts of an HTTP server for the requests of its clients.

* A connection on which no request begins is closed after a while: one that a client opened and forgot.
* A connection whose request is not here whole in time is closed: a body that never ends.
* A request that is here whole is answered, however long that takes, and costs no timer.
"""

from __future__ import annotations

import asyncio
from typing import Any


class RequestTimeouts(asyncio.Protocol):
    """A base class of a server's protocol, named before uvicorn's ``HttpToolsProtocol``. Between an answer and the next
    bytes of the client uvicorn's own timer runs, ``timeout_keep_alive``."""

    idle_timeout_s: float
    """Seconds for the first request to begin, after the client connected: as long as an idle connection is kept."""

    request_timeout_s: float
    """Seconds for a request to be here whole, from its first byte."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_within_request = False
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer(self.idle_timeout_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            return
        if self._is_within_request:
            self._start_timer(self.request_timeout_s)
        elif self.cycle is None or self.cycle.response_complete:
            self._start_timer(self.idle_timeout_s)  # an empty line, which ended uvicorn's timer

    def on_message_begin(self) -> None:
        super().on_message_begin()  # type: ignore[misc]  # of uvicorn's protocol, which comes behind this class
        self._is_within_request = True
        self._stop_timer()

    def on_message_complete(self) -> None:
        super().on_message_complete()  # type: ignore[misc]
        self._is_within_request = False
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _start_timer(self, duration_s: float) -> None:
        self._timer = self.loop.call_later(duration_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

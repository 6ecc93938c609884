"""The patience of an HTTP server with its clients.

* A connection on which no request begins is closed after a while: one that a client opened and forgot.
* A connection whose request is not here whole in time is closed: a body that never ends.
* A request that is here whole is answered, however long that takes, and costs no timer.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Impatient(asyncio.Protocol):
    """To stand before uvicorn's ``HttpToolsProtocol`` among the bases of a server's own. Between an answer and what the
    client says next uvicorn's own timer runs, ``timeout_keep_alive``."""

    silent_s: float
    """For the first request to begin, from when the client connected: as long as an idle connection is kept."""

    request_s: float
    """For a request to be here whole, from its first byte."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_within_request = False
        self._deadline: asyncio.TimerHandle | None = None
        self._wait(self.silent_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:
            return
        if self._is_within_request:
            self._wait(self.request_s)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait(self.silent_s)  # an empty line, which ended uvicorn's timer

    def on_message_begin(self) -> None:
        super().on_message_begin()  # type: ignore[misc]  # of uvicorn's protocol, which comes behind this class
        self._is_within_request = True
        self._wait_no_more()

    def on_message_complete(self) -> None:
        super().on_message_complete()  # type: ignore[misc]
        self._is_within_request = False
        self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait(self, duration_s: float) -> None:
        self._deadline = self.loop.call_later(duration_s, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

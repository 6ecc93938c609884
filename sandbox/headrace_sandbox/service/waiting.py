"""uvicorn's HTTP protocol, which knows when a client does not come back.

* Whoever asks for it (``HUNG_UP`` among the extensions of a request's scope) is called when the client hangs up.
* A connection whose request is not here whole in time is closed: one that a client opened and forgot, and a body that
  never ends.
* What comes whole costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_S = 120.0
"""For the first request to be here, from when the client connected, and for each other from its first byte. The largest
body that is read by default comes in time at 0.6 MB/s."""


HUNG_UP = "headrace.hung_up"
"""What is called when the client of a request hangs up: a list, to which may be added. A task that waits for
``http.disconnect`` would cost each request more."""


class ImpatientProtocol(HttpToolsProtocol):
    """Between two requests uvicorn's own timer runs, ``timeout_keep_alive``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._is_within_request = False
        self._deadline: asyncio.TimerHandle | None = None
        self._hung_up: list[Callable[[], object]] = []
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_within_request and self._deadline is None:
            self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_within_request = True
        extensions: dict[str, Any] = {HUNG_UP: self._hung_up}
        self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_within_request = False
        self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()
        for call in self._hung_up:
            call()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

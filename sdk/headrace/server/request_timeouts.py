"""Timeouts of a server's connection while it waits for a request.

* A connection on which no request begins in time is closed.
* A connection whose request does not arrive completely in time is closed.
* A complete request needs no timer, however long its response takes.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from typing import NamedTuple


class RequestTimeouts(NamedTuple):
    """Timeouts in seconds. Between a response and the client's next bytes uvicorn's own timer runs.

    ``idle_s``: longest time from the connection to the start of a request. ``request_s``: longest time from the first
    byte of a request to its last.
    """

    idle_s: float
    request_s: float


class RequestTimer:
    """The timer of one connection. The protocol calls its methods as it reads."""

    def __init__(
        self,
        timeouts: RequestTimeouts,
        call_later: Callable[[float, Callable[[], object]], TimerHandle],
        close: Callable[[], object],
    ) -> None:
        self._timeouts = timeouts
        self._call_later = call_later
        self._close = close
        self._is_within_request = False
        self._handle: TimerHandle | None = None
        self._start(timeouts.idle_s)

    def bytes_received(self, *, is_idle: bool) -> None:
        """Call this after the bytes were processed. ``is_idle``: no request is being read or handled."""
        if self._handle is not None:
            return
        if self._is_within_request:
            self._start(self._timeouts.request_s)
        elif is_idle:
            self._start(self._timeouts.idle_s)  # an empty line, which stopped uvicorn's timer

    def request_begun(self) -> None:
        self._is_within_request = True
        self.stop()

    def request_complete(self) -> None:
        self._is_within_request = False
        self.stop()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _start(self, duration_s: float) -> None:
        self._handle = self._call_later(duration_s, self._close)

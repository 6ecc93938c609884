"""Timeouts of a connection for the requests of its client.

* A connection on which no request begins is closed after a while: one that a client opened and forgot.
* A connection whose request is not here whole in time is closed: a body that never ends.
* A request that is here whole is answered, however long that takes, and costs no timer.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from typing import NamedTuple


class RequestTimeouts(NamedTuple):
    """Seconds. Between an answer and the next bytes of the client the server's own timer runs."""

    idle_s: float
    """For a request to begin, after the client connected: as long as an idle connection is kept."""

    request_s: float
    """For a request to be here whole, from its first byte."""


class RequestTimer:
    """The timer of one connection, told of what the server reads."""

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
        """To be called behind what came of them. ``is_idle``: no request is under way, and none is answered."""
        if self._handle is not None:
            return
        if self._is_within_request:
            self._start(self._timeouts.request_s)
        elif is_idle:
            self._start(self._timeouts.idle_s)  # an empty line, which ended the server's timer

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

"""Timeouts of a connection while it waits for a request, on a clock that does not advance."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from typing import cast

import pytest

from headrace.server.request_timeouts import RequestTimeouts, RequestTimer


class Clock:
    """Timers of one connection. ``running`` lists the delays of those that were not cancelled."""

    def __init__(self) -> None:
        self.running: list[float] = []
        self.started = 0
        self.timer = RequestTimer(RequestTimeouts(idle_s=75, request_s=600), self.call_later, lambda: None)

    def call_later(self, delay_s: float, call: Callable[[], object]) -> TimerHandle:
        self.running.append(delay_s)
        self.started += 1
        return cast(TimerHandle, _Handle(self.running))


class _Handle:
    def __init__(self, running: list[float]) -> None:
        self._running = running

    def cancel(self) -> None:
        self._running.pop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_connection_on_which_no_request_begins_in_time_is_closed(clock: Clock):
    assert clock.running == [75]
    clock.timer.bytes_received(is_idle=True)  # an empty line
    assert clock.running == [75]


def test_a_connection_on_which_no_further_request_begins_in_time_is_closed(clock: Clock):
    clock.timer.request_begun()
    clock.timer.request_complete()
    clock.timer.bytes_received(is_idle=False)
    assert not clock.running
    clock.timer.bytes_received(is_idle=True)  # an empty line after its response
    assert clock.running == [75]


def test_a_connection_whose_request_does_not_arrive_completely_in_time_is_closed(clock: Clock):
    clock.timer.request_begun()
    clock.timer.bytes_received(is_idle=False)
    clock.timer.bytes_received(is_idle=False)
    assert clock.running == [600]
    clock.timer.request_complete()
    assert not clock.running


def test_a_complete_request_needs_no_timer(clock: Clock):
    before = clock.started
    for _ in range(3):
        clock.timer.request_begun()
        clock.timer.request_complete()
        clock.timer.bytes_received(is_idle=False)
    assert clock.started == before
    assert not clock.running


def test_a_lost_connection_leaves_no_timer(clock: Clock):
    clock.timer.stop()
    assert not clock.running

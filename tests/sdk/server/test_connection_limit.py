"""The limit of open connections: whom it closes, and services with few descriptors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import resource
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.connection_limit import (
    FIRST_REQUEST_S,
    ConnectionLimit,
    limit_for_descriptors,
)


class Connection:
    """A connection that notes whether it was closed."""

    def __init__(self, *, waits_for_client: bool = True, idle_since: float | None = None) -> None:
        self.waits_for_client, self.idle_since = waits_for_client, idle_since
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def limit_of(most: int, most_unknown: int = 1000, *, step_s: float = 0.0) -> ConnectionLimit:
    """A limit whose clock advances by ``step_s`` with each reading."""
    return ConnectionLimit(most, most_unknown, functools.partial(next, itertools.count(0.0, step_s)))


def opened(limit: ConnectionLimit, *connections: Connection, accept: bool = False) -> None:
    for connection in connections:
        assert limit.open(connection)
        if accept:
            limit.accept(connection)


def test_at_the_limit_the_oldest_connection_on_which_no_token_was_accepted_is_closed_first():
    limit = limit_of(3)
    worker, first, second, third = (Connection() for _ in range(4))
    opened(limit, worker, accept=True)
    opened(limit, first, second, third)
    assert [c.aborted for c in (worker, first, second, third)] == [False, True, False, False]


def test_a_connection_whose_request_is_handled_is_not_closed_before_one_that_waits_for_its_client():
    limit = limit_of(2)
    busy, silent, new = Connection(waits_for_client=False), Connection(), Connection()
    opened(limit, busy, silent, new)
    assert (busy.aborted, silent.aborted) == (False, True)


def test_then_the_one_with_an_accepted_token_that_is_idle_for_longest_is_closed():
    limit = limit_of(3)
    pulling, early, late, new = Connection(), Connection(idle_since=1.0), Connection(idle_since=2.0), Connection()
    opened(limit, pulling, late, early, accept=True)
    opened(limit, new)
    assert [c.aborted for c in (pulling, early, late, new)] == [False, True, False, False]


def test_a_connection_is_refused_only_if_every_other_one_has_an_accepted_token_and_carries_a_request():
    limit = limit_of(2)
    first, second, third = Connection(), Connection(), Connection()
    opened(limit, first, second, accept=True)
    assert not limit.open(third)
    limit.remove(first)
    assert limit.open(third)
    assert not any(connection.aborted for connection in (first, second, third))


def test_connections_on_which_no_token_was_accepted_have_a_lower_limit_of_their_own():
    limit = limit_of(100, most_unknown=2, step_s=FIRST_REQUEST_S)
    workers = [Connection() for _ in range(10)]
    for worker in workers:
        opened(limit, worker, accept=True)
    first, second, third = (Connection() for _ in range(3))
    opened(limit, first, second, third)
    assert [c.aborted for c in (first, second, third)] == [True, False, False]
    assert not any(worker.aborted for worker in workers)


def test_that_limit_holds_for_those_that_had_time_to_send_a_request():
    limit = limit_of(100, most_unknown=2, step_s=FIRST_REQUEST_S / 20)
    fleet = [Connection() for _ in range(20)]
    opened(limit, *fleet)
    assert not any(connection.aborted for connection in fleet)
    late = Connection()
    opened(limit, late)
    assert [connection.aborted for connection in fleet] == [True, *[False] * 19]


def test_a_burst_of_silent_connections_is_closed_down_to_that_limit_though_no_other_client_connects():
    now = [0.0]
    limit = ConnectionLimit(100, 2, lambda: now[0])
    worker, burst = Connection(), [Connection() for _ in range(6)]
    opened(limit, worker, accept=True)
    opened(limit, *burst)
    limit.close_late()
    assert not any(c.aborted for c in burst)  # they may still send a request
    now[0] = FIRST_REQUEST_S
    limit.close_late()
    assert [c.aborted for c in (*burst, worker)] == [True, True, True, True, False, False, False]


@given(st.lists(st.tuples(st.sampled_from(["open", "accept", "remove"]), st.integers(0, 30)), max_size=60))
def test_the_open_connections_never_exceed_the_limits(steps: list[tuple[str, int]]):
    limit = limit_of(5, most_unknown=3, step_s=FIRST_REQUEST_S)
    connections = {n: Connection(waits_for_client=n % 3 > 0, idle_since=n if n % 2 else None) for n in range(31)}
    live: dict[Connection, bool] = {}  # with whether a token was accepted
    for step, number in steps:
        connection = connections[number]
        if step == "open" and connection not in live and not connection.aborted:
            if limit.open(connection):
                live[connection] = False
        elif step == "accept" and connection in live:
            limit.accept(connection)
            live[connection] = True
        elif step == "remove" and live.pop(connection, None) is not None:
            limit.remove(connection)
        live = {connection: accepted for connection, accepted in live.items() if not connection.aborted}
        assert len(live) <= 5
        assert sum(not accepted for accepted in live.values()) <= 3


@pytest.mark.parametrize(("soft", "most"), [(1024, 768), (300, 150), (1 << 20, 16_384), (-1, 16_384)])
def test_connections_leave_descriptors_in_reserve(monkeypatch: pytest.MonkeyPatch, soft: int, most: int):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert limit_for_descriptors(lambda: 0.0).most == most


SERVICE = """
import asyncio, contextlib, resource, sys
from headrace.server.listener import listen
from headrace.server.process import http_server, run_until_signal
from headrace.server.uvicorn_protocol import TOKEN_ACCEPTED

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))

async def app(scope, receive, send):
    with open("/dev/null"):  # as a service opens a file of its log
        if scope["path"] == "/worker":
            scope["extensions"][TOKEN_ACCEPTED]()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

async def serve(stop):
    with contextlib.closing(listen("127.0.0.1", 0, option="--port")) as listener:
        async with http_server(app, listener, request_timeout_s=60, shutdown_timeout_s=1):
            print(listener.getsockname()[1], flush=True)
            await stop.wait()

run_until_signal(serve)
"""


def test_silent_connections_beyond_the_descriptors_do_not_keep_others_from_being_served():
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            address = ("127.0.0.1", int(service.stdout.readline()))
            with contextlib.ExitStack() as open_sockets:
                worker = open_sockets.enter_context(socket.create_connection(address, timeout=30))
                require_served(worker)
                silent = [open_sockets.enter_context(socket.create_connection(address, timeout=30)) for _ in range(400)]
                require_served(worker)  # on the connection that it opened before
                require_served(open_sockets.enter_context(socket.create_connection(address, timeout=30)))
                assert silent[0].recv(1) == b"", "the oldest silent one was not closed"
        finally:
            service.terminate()


def require_served(client: socket.socket) -> None:
    client.sendall(b"GET /worker HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"ok"):
        received = client.recv(4096)
        assert received, "the connection was closed"
        answer += received

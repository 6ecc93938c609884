"""Requests over kept connections, to servers that say all sorts of things."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from headrace.http import client
from headrace.http.client import HttpClient, IncompleteResponse, NoResponse, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Says what it is told to, piece by piece, to each request; an empty piece hangs up. ``asked``: the requests of
    each connection. ``left``: how many connections were closed by the client, or broke off."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.says: Sequence[bytes] = [OK]
        self.asked: list[list[bytes]] = []
        self.left = asyncio.Semaphore(0)
        self.waits = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: list[bytes] = []
        self.asked.append(asked)
        try:
            while True:
                asked.append(await reader.readuntil(b"\r\n\r\n"))
                self.waits.set()
                for piece in self.says:
                    if not piece:
                        return
                    writer.write(piece)
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            self.left.release()
        finally:
            writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path / "s")
    async with await asyncio.start_unix_server(made.serve, tmp_path / "s"):
        yield made


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[HttpClient]:
    made = HttpClient(server.address, {"X-Name": "value"})
    yield made
    await made.close()


async def ask(made: HttpClient, timeout_s: float = 30.0) -> tuple[int, bytes]:
    return await made.request("POST", "/path", b"", timeout_s)


async def test_a_connection_is_kept_between_requests(server: Server) -> None:
    async with connected(server) as made:
        for _ in range(3):
            assert await ask(made) == (200, b"ok")
    assert server.asked == [
        [b"POST /path HTTP/1.1\r\nHost: localhost\r\nX-Name: value\r\nContent-Length: 0\r\n\r\n"] * 3
    ]


async def test_a_request_may_have_headers_of_its_own(server: Server) -> None:
    async with connected(server) as made:
        await made.request("POST", "/path", b"", None, {"X-Id": "1"})
        await ask(made)
        with pytest.raises(ValueError, match="X-Id has more than one line"):
            await made.request("POST", "/path", b"", None, {"X-Id": "1\r\nX-Other: y"})
    first, second = server.asked[0]
    assert first == second.replace(b"Content-Length", b"X-Id: 1\r\nContent-Length")


async def test_requests_at_the_same_time_have_connections_of_their_own(server: Server) -> None:
    async with connected(server) as made:
        assert await asyncio.gather(*(ask(made) for _ in range(3))) == [(200, b"ok")] * 3
        await ask(made)
    assert sorted(len(asked) for asked in server.asked) == [1, 1, 2]


@pytest.mark.parametrize(
    "says",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"],  # as it says
        [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"],
        [OK, b""],  # as it does
    ],
)
async def test_a_connection_that_the_server_closes_is_not_used_again(server: Server, says: Sequence[bytes]) -> None:
    server.says = says
    async with connected(server) as made:
        await ask(made)
        for _ in range(5):  # the event loop hears of it
            await asyncio.sleep(0)
        assert await ask(made) == (200, b"ok")
    assert [len(asked) for asked in server.asked] == [1, 1]


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server) as made:
        await ask(made)
        monkeypatch.setattr(client, "KEEP_ALIVE_S", 0.0)
        await ask(made)
        assert [len(asked) for asked in server.asked] == [1, 1]
        await server.left.acquire()


@pytest.mark.parametrize(
    "says",
    [
        [OK[at : at + 1] for at in range(len(OK))],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK],
        [b"HTTP/1.1 200 OK\r\n\r\no", b"k", b""],
    ],
    ids=["bytes", "chunks", "after another", "until the end of the connection"],
)
async def test_an_answer_may_come_in_any_pieces(server: Server, says: Sequence[bytes]) -> None:
    server.says = says
    async with connected(server) as made:
        assert [await ask(made) for _ in range(2)] == [(200, b"ok")] * 2


@pytest.mark.parametrize("says", [[b""], [OK[:20], b""], [OK[:-1], b""], [b"220 mail.example\r\n"]])
async def test_an_answer_that_breaks_off_is_lost(server: Server, says: Sequence[bytes]) -> None:
    server.says = says
    async with connected(server) as made:
        with pytest.raises(NoResponse):
            await ask(made)
        server.says = [OK]
        assert await ask(made) == (200, b"ok")


async def test_what_breaks_off_is_told_from_what_never_began(server: Server) -> None:
    async with connected(server) as made:
        for says, kind in (
            ([b""], NoResponse),
            ([OK[:20], b""], IncompleteResponse),
            ([OK[:-1], b""], IncompleteResponse),
        ):
            server.says = says
            with pytest.raises(NoResponse) as caught:
                await ask(made)
            assert type(caught.value) is kind


async def test_an_answer_that_is_too_long_is_not_read_to_its_end(server: Server) -> None:
    made = HttpClient(server.address, {}, most_bytes=2 * len(OK))
    for _ in range(3):
        assert await ask(made) == (200, b"ok")
    server.says = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\no\r\n"] * 1000]
    with pytest.raises(NoResponse, match="longer than"):
        await ask(made)
    await server.left.acquire()
    await made.close()


async def test_an_answer_to_nothing_is_given_to_nobody(server: Server) -> None:
    server.says = [OK, OK.replace(b"200", b"500")]
    async with connected(server) as made:
        assert await ask(made) == (200, b"ok")
        await server.left.acquire()
        assert await ask(made) == (200, b"ok")


async def test_an_answer_before_the_request_was_sent_ends_its_connection(server: Server) -> None:
    async with connected(server) as made:
        assert await made.request("POST", "/path", bytes(8 << 20), 30.0) == (200, b"ok")
        assert await ask(made) == (200, b"ok")
    assert [len(asked) for asked in server.asked] == [1, 1]


async def test_who_waits_for_too_long_hangs_up(server: Server) -> None:
    server.says = []
    async with connected(server) as made:
        with pytest.raises(NoResponse, match="silent"):
            await ask(made, timeout_s=0.01)
        await server.left.acquire()


async def test_whoever_is_cancelled_hangs_up(server: Server) -> None:
    server.says = []
    async with connected(server) as made:
        asking = asyncio.ensure_future(ask(made))
        await server.waits.wait()
        asking.cancel()
        await server.left.acquire()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_who_waits_on_connections_that_are_closed_gets_lost(server: Server) -> None:
    server.says = []
    async with connected(server) as made:
        asking = asyncio.ensure_future(ask(made))
        await server.waits.wait()
        await made.close()
        with pytest.raises(NoResponse):
            await asking


async def test_a_server_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    for address in (f"unix://{tmp_path / 'nothing'}", "http://127.0.0.1:1"):
        with pytest.raises(Unreachable):
            await ask(HttpClient(address, {}))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_tries_at_a_server_that_is_not_there_leave_nothing_to_close(run: Callable[..., None]) -> None:
    async def tried() -> None:
        made = HttpClient("http://127.0.0.1:1", {})
        for _ in range(3):
            with pytest.raises(Unreachable):
                await ask(made)
        await made.close()

    run(tried())


@asynccontextmanager
async def hearing() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server's port, and the heads of what it is asked; it answers all of it."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heads


async def test_an_address_may_have_a_path() -> None:
    async with hearing() as (port, asked):
        made = HttpClient(f"http://user@127.0.0.1:{port}/a b/", {})
        assert await ask(made) == (200, b"ok")
        await made.close()
    assert asked[0].startswith(f"POST /a%20b/path HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())


async def test_a_name_and_a_password_in_an_address_go_with_every_request_without_another_authorization() -> None:
    async with hearing() as (port, asked):
        address = f"http://us%20er:pass@127.0.0.1:{port}"
        for headers in ({}, {"Authorization": "Bearer x"}):
            made = HttpClient(address, headers)
            await ask(made)
            await made.close()
    first, second = asked
    assert b"\r\nAuthorization: Basic dXMgZXI6cGFzcw==\r\n" in first
    assert second == first.replace(b"Basic dXMgZXI6cGFzcw==", b"Bearer x")


def test_what_is_no_address_or_no_header_is_refused() -> None:
    for address in ("", "/run/x.sock", "unix://relative/x", "ftp://host", "http://", "http://host:99999"):
        with pytest.raises(ValueError, match=r"address|ort"):
            HttpClient(address, {})
    with pytest.raises(ValueError, match="Authorization has more than one line"):
        HttpClient("http://host", {"Authorization": "Bearer x\r\nX-Other: y"})

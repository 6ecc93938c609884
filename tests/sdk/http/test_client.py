"""The HTTP client, against a server that sends scripted bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from headrace.http import client as http_client
from headrace.http.client import HttpClient, IncompleteResponse, NoResponse, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Sends ``pieces`` in response to each request; an empty piece closes the connection.

    ``requests``: the requests of each connection. ``closed``: released when the client closes a connection.
    """

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.pieces: Sequence[bytes] = [OK]
        self.requests: list[list[bytes]] = []
        self.closed = asyncio.Semaphore(0)
        self.received = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[bytes] = []
        self.requests.append(requests)
        try:
            while True:
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                self.received.set()
                for piece in self.pieces:
                    if not piece:
                        return
                    writer.write(piece)
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            self.closed.release()
        finally:
            writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "s")
    async with await asyncio.start_unix_server(server.serve, tmp_path / "s"):
        yield server


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.address, {"X-Name": "value"})
    yield client
    await client.close()


async def send(client: HttpClient, timeout_s: float = 30.0) -> tuple[int, bytes]:
    return await client.request("POST", "/path", b"", timeout_s)


async def test_a_connection_is_kept_between_requests(server: Server) -> None:
    async with connected(server) as client:
        for _ in range(3):
            assert await send(client) == (200, b"ok")
    assert server.requests == [
        [b"POST /path HTTP/1.1\r\nHost: localhost\r\nX-Name: value\r\nContent-Length: 0\r\n\r\n"] * 3
    ]


async def test_a_request_may_have_additional_headers(server: Server) -> None:
    async with connected(server) as client:
        await client.request("POST", "/path", b"", None, {"X-Id": "1"})
        await send(client)
        with pytest.raises(ValueError, match="X-Id has several lines"):
            await client.request("POST", "/path", b"", None, {"X-Id": "1\r\nX-Other: y"})
    first, second = server.requests[0]
    assert first == second.replace(b"Content-Length", b"X-Id: 1\r\nContent-Length")


async def test_concurrent_requests_use_separate_connections(server: Server) -> None:
    async with connected(server) as client:
        assert await asyncio.gather(*(send(client) for _ in range(3))) == [(200, b"ok")] * 3
        await send(client)
    assert sorted(len(requests) for requests in server.requests) == [1, 1, 2]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"],  # announced
        [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"],
        [OK, b""],  # not announced
    ],
)
async def test_a_connection_that_the_server_closed_is_not_reused(server: Server, pieces: Sequence[bytes]) -> None:
    server.pieces = pieces
    async with connected(server) as client:
        await send(client)
        for _ in range(5):  # lets the event loop notice
            await asyncio.sleep(0)
        assert await send(client) == (200, b"ok")
    assert [len(requests) for requests in server.requests] == [1, 1]


async def test_a_connection_that_was_idle_for_long_is_not_reused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server) as client:
        await send(client)
        monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.0)
        await send(client)
        assert [len(requests) for requests in server.requests] == [1, 1]
        await server.closed.acquire()


@pytest.mark.parametrize(
    "pieces",
    [
        [OK[at : at + 1] for at in range(len(OK))],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK],
        [b"HTTP/1.1 200 OK\r\n\r\no", b"k", b""],
    ],
    ids=["bytes", "chunks", "after an interim response", "until the end of the connection"],
)
async def test_a_response_may_arrive_in_any_pieces(server: Server, pieces: Sequence[bytes]) -> None:
    server.pieces = pieces
    async with connected(server) as client:
        assert [await send(client) for _ in range(2)] == [(200, b"ok")] * 2


@pytest.mark.parametrize("pieces", [[b""], [OK[:20], b""], [OK[:-1], b""], [b"220 mail.example\r\n"]])
async def test_a_broken_response_raises_no_response(server: Server, pieces: Sequence[bytes]) -> None:
    server.pieces = pieces
    async with connected(server) as client:
        with pytest.raises(NoResponse):
            await send(client)
        server.pieces = [OK]
        assert await send(client) == (200, b"ok")


async def test_a_response_that_began_raises_incomplete_response(server: Server) -> None:
    async with connected(server) as client:
        for pieces, kind in (
            ([b""], NoResponse),
            ([OK[:20], b""], IncompleteResponse),
            ([OK[:-1], b""], IncompleteResponse),
        ):
            server.pieces = pieces
            with pytest.raises(NoResponse) as caught:
                await send(client)
            assert type(caught.value) is kind


async def test_a_response_that_is_too_long_is_not_read_to_its_end(server: Server) -> None:
    client = HttpClient(server.address, {}, max_response_bytes=2 * len(OK))
    for _ in range(3):
        assert await send(client) == (200, b"ok")
    server.pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\no\r\n"] * 1000]
    with pytest.raises(NoResponse, match="longer than"):
        await send(client)
    await server.closed.acquire()
    await client.close()


async def test_a_response_without_a_request_is_ignored(server: Server) -> None:
    server.pieces = [OK, OK.replace(b"200", b"500")]
    async with connected(server) as client:
        assert await send(client) == (200, b"ok")
        await server.closed.acquire()
        assert await send(client) == (200, b"ok")


async def test_a_response_before_the_whole_request_was_sent_closes_the_connection(server: Server) -> None:
    async with connected(server) as client:
        assert await client.request("POST", "/path", bytes(8 << 20), 30.0) == (200, b"ok")
        assert await send(client) == (200, b"ok")
    assert [len(requests) for requests in server.requests] == [1, 1]


async def test_a_request_that_times_out_closes_its_connection(server: Server) -> None:
    server.pieces = []
    async with connected(server) as client:
        with pytest.raises(NoResponse, match="silent"):
            await send(client, timeout_s=0.01)
        await server.closed.acquire()


async def test_a_cancelled_request_closes_its_connection(server: Server) -> None:
    server.pieces = []
    async with connected(server) as client:
        request = asyncio.ensure_future(send(client))
        await server.received.wait()
        request.cancel()
        await server.closed.acquire()
        with pytest.raises(asyncio.CancelledError):
            await request


async def test_closing_the_client_ends_its_requests(server: Server) -> None:
    server.pieces = []
    async with connected(server) as client:
        request = asyncio.ensure_future(send(client))
        await server.received.wait()
        await client.close()
        with pytest.raises(NoResponse):
            await request


async def test_a_server_that_does_not_exist_is_unreachable(tmp_path: Path) -> None:
    for address in (f"unix://{tmp_path / 'nothing'}", "http://127.0.0.1:1"):
        with pytest.raises(Unreachable):
            await send(HttpClient(address, {}))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_failed_connections_leave_nothing_to_close(run: Callable[..., None]) -> None:
    async def tried() -> None:
        client = HttpClient("http://127.0.0.1:1", {})
        for _ in range(3):
            with pytest.raises(Unreachable):
                await send(client)
        await client.close()

    run(tried())


@asynccontextmanager
async def recording_server() -> AsyncIterator[tuple[int, list[bytes]]]:
    """The port of a server that responds to all requests, and the heads of its requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heads


async def test_an_address_may_have_a_path() -> None:
    async with recording_server() as (port, requests):
        client = HttpClient(f"http://user@127.0.0.1:{port}/a b/", {})
        assert await send(client) == (200, b"ok")
        await client.close()
    assert requests[0].startswith(f"POST /a%20b/path HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())


async def test_a_name_and_a_password_in_the_address_are_sent_with_every_request_without_another_authorization() -> None:
    async with recording_server() as (port, requests):
        address = f"http://us%20er:pass@127.0.0.1:{port}"
        for headers in ({}, {"Authorization": "Bearer x"}):
            client = HttpClient(address, headers)
            await send(client)
            await client.close()
    first, second = requests
    assert b"\r\nAuthorization: Basic dXMgZXI6cGFzcw==\r\n" in first
    assert second == first.replace(b"Basic dXMgZXI6cGFzcw==", b"Bearer x")


def test_an_invalid_address_or_header_is_refused() -> None:
    for address in ("", "/run/x.sock", "unix://relative/x", "ftp://host", "http://", "http://host:99999"):
        with pytest.raises(ValueError, match=r"address|ort"):
            HttpClient(address, {})
    with pytest.raises(ValueError, match="Authorization has several lines"):
        HttpClient("http://host", {"Authorization": "Bearer x\r\nX-Other: y"})

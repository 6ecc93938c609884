"""Case G08: stalled readers do not make the projection's write-ahead file grow, and it shrinks again.

Short form: 3 rounds of 600 trajectories over 8 connections instead of 10 rounds of 50,000 over 32 (`make chaos`: 10
rounds of 3,000 over 32); the limit is lowered with it. A snapshot that a reader held would be seen at
any scale: SQLite then refuses to empty the file.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

import headrace
from headrace.trajectory import Provenance, Trajectory
from headrace_orchestrator.buffer.projection import sqlite
from tests.orchestrator.serving import Api, Process, orchestrator, record_for, submission, until

ROUNDS = int(os.environ.get("HEADRACE_G08_ROUNDS", "3"))
EACH, CONNECTIONS = (600, 8) if ROUNDS <= 3 else (3000, 32)
MOST_BYTES = 5 << 20
"""SQLite checkpoints each 1,000 pages of 4 KiB; a page more of each transaction may be there."""


async def ingest(api: Api, count: int) -> None:
    """Submit small trajectories over several connections."""
    left = count

    async def worker(name: str) -> None:
        nonlocal left
        while left > 0:
            left -= 10
            attempts = await api.lease(name, free=10)
            records = ((a, record_for(a, messages=[], provenance=Provenance(worker=name))) for a in attempts)
            await api.submit(submission(records), worker=name)

    await asyncio.gather(*(worker(f"worker-{number}") for number in range(CONNECTIONS)))


def wal_bytes(data: Path) -> int:
    return (data / "projection.sqlite-wal").stat().st_size


@contextmanager
def stalled_page(url: str) -> Iterator[None]:
    """A listing whose client stops after the beginning."""
    address = urlsplit(url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(b"GET /v1/runs/run/trajectories?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
        yield


def stalled_reading(data: Path) -> Iterator[Trajectory]:
    """``headrace.open``, stopped after the first trajectory."""
    reading = headrace.open(data).trajectories()
    next(reading)
    return reading


async def test_g08_stalled_readers_do_not_let_the_write_ahead_file_grow(process: Process):
    url = process.start()
    sizes = []
    async with aiohttp.ClientSession(url) as session:
        api = Api(session)
        await api.create_run(group_size=1, batch_size=2 * ROUNDS * EACH)
        await ingest(api, 50)
        for _ in range(ROUNDS):
            reading = stalled_reading(process.data)
            with stalled_page(url):
                await ingest(api, EACH)
                await until(lambda: _projected(api, 600))
                sizes.append(wal_bytes(process.data))
                assert no_reader_has_a_snapshot(process.data)
            assert next(reading)
            await ingest(api, 20)
        assert max(sizes) <= MOST_BYTES
        assert sizes[-1] <= max(sizes[0], MOST_BYTES // 2) * 2
        async with session.get("/metrics") as answer:
            metrics = await answer.text()
    assert "headrace_store_projection_wal_bytes" in metrics


async def _projected(api: Api, count: int) -> bool:
    return len((await api.ask("GET", f"/v1/runs/run/trajectories?limit={count}"))["trajectories"]) == count


def no_reader_has_a_snapshot(data: Path) -> bool:
    """True if the write-ahead file can be emptied: SQLite refuses that while a reader is active."""
    connection = sqlite3.connect(data / "projection.sqlite", timeout=5, isolation_level=None)
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        connection.close()


@contextmanager
def snapshot(data: Path) -> Iterator[None]:
    """An external program with an open read transaction."""
    connection = sqlite3.connect(data / "projection.sqlite", isolation_level=None)
    connection.execute("BEGIN")
    connection.execute("SELECT COUNT(*) FROM trajectories").fetchall()
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_g08_the_write_ahead_file_shrinks_when_an_external_reader_is_gone(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
):
    monkeypatch.setattr(sqlite, "WAL_LIMIT_BYTES", 64 << 10)
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=1024)
        await ingest(api, 20)
        with snapshot(data_dir):
            for _ in range(3):
                await ingest(api, 200)
                await until(lambda: _projected(api, 200))
            await until(lambda: _grown(data_dir))
        if goes_on:
            await ingest(api, 20)
        await until(lambda: _shrunk(data_dir), deadline_s=30)
        assert len((await api.ask("GET", "/v1/runs/run/trajectories?limit=1000"))["trajectories"]) >= 600


async def _grown(data: Path) -> bool:
    return wal_bytes(data) > 128 << 10


async def _shrunk(data: Path) -> bool:
    return wal_bytes(data) <= 64 << 10

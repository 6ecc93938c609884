"""Two orchestrators and one data directory: the lock keeps the second out; if the lock is lost, the epoch does.

* A second orchestrator is refused while the first is stopped, however long that takes.
* An old orchestrator that continues beside the new one acknowledges nothing, writes nothing into the new one's files,
  and names the new owner of the directory.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from headrace.batch.batch import Batch
from headrace.errors import DataDirectoryInUse
from headrace_orchestrator.buffer.data_directory import DataDirectory
from tests.orchestrator.serving import Api, Process, record_for, submission


@pytest.fixture
def old(data_dir: Path) -> Iterator[Process]:
    yield from ending(Process(data_dir))


@pytest.fixture
def new(data_dir: Path) -> Iterator[Process]:
    yield from ending(Process(data_dir))


def ending(process: Process) -> Iterator[Process]:
    yield process
    process.end()


async def test_a_second_orchestrator_is_refused_while_the_first_is_stopped(old: Process, data_dir: Path) -> None:
    url = old.start()
    old.signal(signal.SIGSTOP)
    with pytest.raises(DataDirectoryInUse, match="belongs to a running orchestrator"):
        DataDirectory.claim(data_dir)
    old.signal(signal.SIGCONT)
    async with aiohttp.ClientSession(url) as session:
        await Api(session).create_run()


async def test_an_old_orchestrator_that_continues_beside_the_new_one_acknowledges_nothing(
    old: Process, new: Process, data_dir: Path
) -> None:
    async with aiohttp.ClientSession(old.start(log_file_bytes=4096)) as session:
        first = Api(session)
        await first.create_run()
        attempts = await first.lease(free=4)
        old.signal(signal.SIGSTOP)
        sent_while_stopped = asyncio.create_task(post(first, submission((a, record_for(a)) for a in attempts[2:])))
        (data_dir / "owner").unlink()  # a lock is lost like that: its file is deleted, or its volume attached elsewhere

        async with aiohttp.ClientSession(new.start(log_file_bytes=4096)) as other:
            second = Api(other)
            results = await second.submit(submission((a, record_for(a)) for a in attempts))
            assert {result.verdict for result in results} == {"accepted"}
            old.signal(signal.SIGCONT)
            status, answer = await sent_while_stopped
            assert status == 507
            assert "was taken by another orchestrator, of epoch 2" in answer
            for _ in range(3):  # also later, and in a new file of its own
                status, answer = await post(first, submission((a, record_for(a)) for a in attempts))
                assert status == 503
                assert "was taken by another orchestrator" in answer
            await second.play(free=4)
            batch = await second.pull()
            assert isinstance(batch, Batch)
            await second.ack(batch, "0.1")
            stored = await episodes(second)
        assert old.wait() == 1
        assert (data_dir / "address").exists()
        new.kill()

    async with aiohttp.ClientSession(new.start()) as session:
        third = Api(session)
        assert await episodes(third) == stored
        assert len(stored) == 8
        async with session.get("/metrics") as answered:
            assert "headrace_log_damaged_records_total 0.0" in await answered.text()


async def post(api: Api, body: bytes) -> tuple[int, str]:
    """Submit; returns status and text of the response."""
    async with api.session.post("/v1/worker/submit?worker=worker-1", data=body) as answer:
        return answer.status, await answer.text()


async def episodes(api: Api) -> set[str]:
    listing = await api.ask("GET", "/v1/runs/run/trajectories?limit=100")
    return {item["episode"] for item in listing["trajectories"]}

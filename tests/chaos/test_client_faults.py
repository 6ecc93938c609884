"""Workers and learners that stop, go silent, read slowly or act twice; and a wall clock that jumps.

* Records of a worker that was stopped past its lease are rejected, and each of its episodes has one record.
* A learner whose lease ended is superseded by the batch's new holder; of several acks at once, one is accepted.
* A connection that is silent, or reads its response slowly, delays neither other connections nor a shutdown.
* Attempts that were granted to a dead connection are granted again at the worker's next request.
* A wall clock that jumps changes neither leases nor order: durations are measured with the monotonic clock.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from headrace import Client
from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.wire import messages
from tests.builders import make_segment
from tests.chaos.campaign import SPEC
from tests.chaos.checker import check
from tests.e2e.processes import Processes, answers, free_port, wait_for
from tests.e2e.recorder import Recorder
from tests.orchestrator.serving import Api, orchestrator, record_for, submission, until

DAY_S = 86_400.0

LONG = make_segment(spans=((10, 100_000),))
"""Some 900 KB: a batch of them exceeds the buffers of sockets."""


def test_a_worker_that_was_stopped_past_its_lease_leaves_one_record_for_each_episode(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Recorder(url) as recorder, Processes(tmp_path / "logs") as processes:
        processes.orchestrator(tmp_path / "data", port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        with Client(url, keepalive=False) as client:
            client.create_run({**SPEC, "attempt_lease_s": 1.0, "max_staleness": 8})
            stopped = processes.add(
                "stopped", "-m", "tests.chaos.run_role", "worker", str(tmp_path), "stopped", recorder.url
            ).start()
            wait_for("it submits records", lambda: len(recorder.acknowledged.records) > 20)
            stopped.send(signal.SIGSTOP)
            wait_for("its leases are over", lambda: client.run("run").queued > 0 or client.run("run").leased == 0)
            other = processes.add(
                "other", "-m", "tests.chaos.run_role", "worker", str(tmp_path), "other", recorder.url
            ).start()
            wait_for("another one has its episodes", lambda: client.run("run").queued == 0)
            stopped.send(signal.SIGCONT)
            batch = client.pull("run", timeout_s=30)
            client.ack(batch, "0.1")
            known = len(recorder.acknowledged.records)
            wait_for("both continue", lambda: len(recorder.acknowledged.records) > known + 10)
            assert stopped.running
            assert other.running
            client.close_run("run")
            wait_for("no episode is left", lambda: client.run("run").leased + client.run("run").queued == 0)
        for worker in (stopped, other):
            worker.kill()
        assert check(url, "run", tmp_path / "data", recorder.acknowledged).violations == []


async def test_of_several_acks_at_once_one_is_accepted(api: Api) -> None:
    await api.create_run(group_size=1, batch_size=1, max_staleness=40)
    for number in range(20):
        await api.play(free=1)
        sessions = f"one-{number}", f"two-{number}"
        first = await api.pull(learner="a", session=sessions[0])
        second = await api.pull(learner="a", session=sessions[1]) if number % 2 else first
        assert isinstance(first, Batch)
        assert isinstance(second, Batch)
        assert first.id == second.id
        acks = [("a", sessions[0], first), ("a", sessions[1], second), ("b", "b", first)]
        statuses = await asyncio.gather(*(ack(api, *sender, version=f"0.{number + 1}") for sender in acks))
        assert sorted(statuses) == [200, 409, 409], (number, statuses)
        assert (await api.ask("GET", "/v1/runs/run"))["batches_acked"] == number + 1


async def ack(api: Api, learner: str, session: str, batch: Batch, *, version: str) -> int:
    request = messages.AckRequest(learner=learner, session=session, generation=batch.generation, version=version)
    path = f"/v1/runs/run/batches/{batch.id}/ack"
    async with api.session.post(path, data=msgspec.json.encode(request)) as answer:
        await answer.read()
        return answer.status


@pytest.fixture
async def api(data_dir: Path) -> AsyncIterator[Api]:
    async with orchestrator(data_dir) as api:
        yield api


async def test_attempts_granted_to_a_dead_connection_are_granted_again_at_the_workers_next_request(api: Api) -> None:
    request = messages.LeaseRequest(worker="worker-1", slots=64, free=4, wait_s=20)
    async with await RawConnection.connect(api) as silent:
        await silent.send("POST", "/v1/worker/lease", msgspec.json.encode(request))
        await until(lambda: is_known(api, "worker-1"))  # its request waits; nobody will read the response
        await api.create_run(group_size=2, batch_size=4)
        await until(lambda: has_leases(api))
        again = await api.lease("worker-1", free=4, holding=[])
        assert len(again) == 4
        results = await api.submit(submission((a, record_for(a)) for a in again))
        assert {result.verdict for result in results} == {"accepted"}


async def is_known(api: Api, worker: str) -> bool:
    return worker in [item["worker"] for item in (await api.ask("GET", "/v1/status"))["workers"]]


async def has_leases(api: Api) -> bool:
    return bool((await api.ask("GET", "/v1/runs/run"))["leased"])


async def test_a_silent_connection_delays_neither_others_nor_a_shutdown(data_dir: Path) -> None:
    async with AsyncExitStack() as connections:
        async with orchestrator(data_dir) as api:
            await api.create_run()
            attempts = await api.lease(free=4)
            body = submission((a, record_for(a)) for a in attempts)
            half = await connections.enter_async_context(await RawConnection.connect(api))
            await half.send("POST", "/v1/worker/submit?worker=worker-1", body, part=len(body) // 2)
            head = await connections.enter_async_context(await RawConnection.connect(api))
            head.writer.write(b"POST /v1/worker/lease HTTP/1.1\r\nHost: ")
            await head.writer.drain()
            results = await api.submit(body)
            assert {result.verdict for result in results} == {"accepted"}
            assert isinstance(await api.pull(), Batch)
        # The orchestrator has ended here: the shutdown was not delayed either.
        assert await head.reader.read() == b""


async def test_a_slow_reader_of_a_batch_delays_nobody_and_gets_the_same_bytes(api: Api) -> None:
    await api.create_run(group_size=1, batch_size=16, max_staleness=3)
    for _ in range(16):
        await api.play(free=1, segments=[LONG])
    request = messages.PullRequest(learner="slow", session="slow", request=new_id())
    async with await RawConnection.connect(api, limit=1 << 12) as slow:
        await slow.send("POST", "/v1/runs/run/pull", msgspec.json.encode(request))
        assert (await slow.reader.readexactly(12)) == b"HTTP/1.1 200"
        for _ in range(16):  # others are served meanwhile
            await api.play(free=1, segments=[LONG])
        other = await api.pull(learner="other")
        assert isinstance(other, Batch)
        body = await slow.body()
        again, _ = await api.pull_raw(learner="slow", session="slow", request=request.request)
        assert body == again


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that moves the wall clock by some seconds; the monotonic clock is unchanged."""
    offset = [0.0]
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(offset[0] * 1e9))

    def move(by_s: float) -> None:
        offset[0] += by_s

    return move


async def test_a_wall_clock_that_jumps_changes_neither_leases_nor_order(data_dir: Path, wall: Any) -> None:
    order: list[str] = []
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=4, max_staleness=8)
        for jump in (DAY_S, -2 * DAY_S, 365 * DAY_S):
            attempts = await api.lease(free=4)
            wall(jump)
            results = await api.submit(submission((a, record_for(a)) for a in attempts))
            assert {result.verdict for result in results} == {"accepted"}
            order += [attempt.episode for attempt in attempts]
        leased = await api.pull(learner="a")
        assert isinstance(leased, Batch)
        wall(-366 * DAY_S)
        assert await ack(api, "a", "one", leased, version="0.1") == 200
    wall(-DAY_S)
    async with orchestrator(data_dir) as api:
        assert [item["episode"] for item in await listing(api)] == order[::-1]
        assert all(item["age_s"] >= 0 for item in await listing(api))
        batch = await api.pull()
        assert isinstance(batch, Batch)
        assert {t.episode for t in batch.trajectories} == set(order[4:8])


async def listing(api: Api) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await api.ask("GET", "/v1/runs/run/trajectories?limit=100"))["trajectories"]
    return items


class RawConnection:
    """A connection whose bytes the test sends and reads itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.host = "{}:{}".format(*writer.get_extra_info("peername"))

    @classmethod
    async def connect(cls, api: Api, *, limit: int = 1 << 16) -> RawConnection:
        """Connect to the service of ``api``; at most ``limit`` bytes are read ahead."""
        address = urlsplit(str(api.session._base_url))
        return cls(*await asyncio.open_connection(address.hostname, address.port, limit=limit))

    async def send(self, method: str, target: str, body: bytes, *, part: int | None = None) -> None:
        """Send a request, or only ``part`` bytes of its body."""
        kind = "application/json" if part is None else messages.RECORDS_MEDIA_TYPE
        head = (
            f"{method} {target} HTTP/1.1",
            f"Host: {self.host}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
        )
        self.writer.write("\r\n".join((*head, "", "")).encode() + body[:part])
        await self.writer.drain()

    async def body(self) -> bytes:
        """Read the rest of a response in small pieces; its first bytes were read before."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        body = bytearray()
        while len(body) < length:
            body += await self.reader.read(min(1 << 12, length - len(body)))
        return bytes(body)

    async def __aenter__(self) -> RawConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

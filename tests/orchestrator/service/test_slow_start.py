"""A slow start: the service answers from the first moment, reports its progress, and becomes ready."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from headrace import AsyncClient
from headrace.trajectory import Provenance
from tests.e2e.processes import free_port
from tests.orchestrator.serving import START_DEADLINE_S, orchestrator, record_for, submission

READ_S = 0.006
"""Seconds to read one frame of the log: a start with 300 frames takes 2 s, in the case 120 s."""

PROBE_EVERY_S, PROBE_TIMEOUT_S, MISSES = 0.2, 1.0, 3
"""A liveness probe's interval, its timeout, and the consecutive misses after which it kills."""

SLOW = f"""
import sys, time
from pathlib import Path
from headrace.store.log_files import LogFile
from headrace_orchestrator.server import run
from headrace_orchestrator.settings import Settings

frames, scan = 0, LogFile.scan

def slowly(file, start=0):
    global frames
    for item in scan(file, start):
        time.sleep({READ_S})
        frames += 1
        yield item

LogFile.scan = slowly
run(Settings(data=Path(sys.argv[1]), port=int(sys.argv[2])), ready=lambda address: print(frames, flush=True))
"""


class Slow:
    """An orchestrator process with a slow disk."""

    def __init__(self, data: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", SLOW, str(data), str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)

    async def frames(self) -> int:
        """Number of frames that the start read; waits until it is complete."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_DEADLINE_S):
            return int(await asyncio.to_thread(self._process.stdout.readline))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def started(data: Path, port: int) -> Iterator[Slow]:
    process = Slow(data, port)
    try:
        yield process
    finally:
        process.kill()


class Prober:
    """The liveness and readiness probes of a cluster."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.lives = 0
        self.misses = 0
        self.phases: list[dict[str, Any]] = []

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get("/healthz") as answer:
                    assert answer.status == 200
                self.lives, self.misses = self.lives + 1, 0
                async with self._session.get("/readyz") as answer:
                    if answer.status == 503:
                        self.phases.append(msgspec.json.decode(await answer.read()))
            except (aiohttp.ClientError, TimeoutError):
                self.misses += self.lives > 0  # no kill before the first response
            assert self.misses < MISSES, "a liveness probe would have killed it"
            await asyncio.sleep(PROBE_EVERY_S)

    async def until_half_way(self) -> None:
        while not self.phases or not self.phases[-1]["done"] >= self.phases[-1]["total"] / 2 > 0:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def submitted(session: aiohttp.ClientSession, worker: str, body: bytes, responses: list[Any]) -> Any:
    """The reply to a submission, repeated until it succeeds; ``responses`` collects the other responses."""
    while True:
        try:
            async with session.post(f"/v1/worker/submit?worker={worker}", data=body) as answer:
                found = msgspec.json.decode(await answer.read())
                if answer.status == 200:
                    return found
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) > 0
                responses.append(found)
        except aiohttp.ClientError:
            pass  # no process runs now
        await asyncio.sleep(PROBE_EVERY_S)


async def test_g21_a_recovery_that_takes_longer_than_the_probe_allows_completes(data_dir: Path, tmp_path: Path):
    bodies: dict[str, bytes] = {}
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=2, batch_size=4, max_staleness=200)
        for _ in range(5):
            await api.play(free=60)
        for worker in ("one", "two"):
            attempts = await api.lease(worker, free=2)
            records = [(a, record_for(a, provenance=Provenance(worker=worker))) for a in attempts]
            bodies[worker] = submission(records)
    (data_dir / "projection.sqlite").unlink()
    shutil.copytree(data_dir, tmp_path / "copy")

    with started(tmp_path / "copy", free_port()) as process:
        undisturbed = await process.frames()
    assert undisturbed > 300

    port, responses = free_port(), list[Any]()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        waiting = [asyncio.create_task(submitted(session, worker, body, responses)) for worker, body in bodies.items()]
        client = AsyncClient(f"http://127.0.0.1:{port}", poll_s=20.0, keepalive=False)
        pulling = asyncio.create_task(client.pull("run"))
        async with client, running(*waiting, pulling):
            with started(data_dir, port):
                prober = Prober(session)
                probing = asyncio.create_task(prober.run())
                async with running(probing), asyncio.timeout(START_DEADLINE_S):
                    await prober.until_half_way()
                    assert not probing.done()
            with started(data_dir, port) as process:
                again = Prober(session)
                probing = asyncio.create_task(again.run())
                async with running(probing):
                    # It starts at the beginning of the log, and earlier starts do not make it longer.
                    assert await process.frames() <= 1.2 * undisturbed
                    results = [result for answer in await asyncio.gather(*waiting) for result in answer["results"]]
                    batch = await pulling
                    assert not probing.done()
        # Nothing was rerun, and every client that had to wait got the reason.
        assert [result["verdict"] for result in results] == ["accepted"] * 4
        assert {trajectory.attempt for trajectory in batch.trajectories} == {1}
    for phases in (prober.phases, again.phases):
        read = [phase for phase in phases if phase["total"]]
        assert {phase["phase"] for phase in read} == {"reading the log"}
        assert [phase["done"] for phase in read] == sorted(phase["done"] for phase in read)
        assert all(phase["estimate_s"] >= 0 for phase in read if 0 < phase["done"] < phase["total"])
        assert any("%" in phase["detail"] for phase in read)
    assert any("%" in problem["detail"] for problem in responses)

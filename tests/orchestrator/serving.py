"""Orchestrators for tests, in this event loop or as a process, and plain requests of workers and learners."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.trajectory import Trajectory
from headrace.wire import codec, messages
from headrace_orchestrator.server import serve
from headrace_orchestrator.service.batches.bodies import ServedBatch
from headrace_orchestrator.settings import Settings
from tests.builders import make_trajectory

START_DEADLINE_S = 30.0
"""Seconds within which a process must be ready."""


async def whole(served: ServedBatch) -> bytes:
    """The body of a batch, to its end."""
    return b"".join([part async for parts in served.body for part in parts])


class Api:
    """Requests to one orchestrator."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None, *, status: int = 200, token: str = "") -> Any:
        """The decoded JSON of a response that must have this status."""
        data = body if isinstance(body, bytes) else None if body is None else msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.request(method, path, data=data, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == status, (answer.status, raw)
            assert answer.headers["Headrace-Epoch"].isdecimal()
            return msgspec.json.decode(raw) if raw else None

    async def create_run(self, **fields: Any) -> dict[str, Any]:
        spec = {"name": "run", "environments": [{"id": "test:Echo"}], "group_size": 2, "batch_size": 4, **fields}
        return await self.ask("POST", "/v1/runs", spec, status=201)

    async def lease(
        self,
        worker: str = "worker-1",
        free: int = 4,
        wait_s: float = 0.0,
        holding: list[messages.AttemptKey] | None = None,
    ) -> list[messages.Assignment]:
        request = messages.LeaseRequest(worker=worker, slots=64, free=free, wait_s=wait_s, holding=holding)
        return msgspec.convert(await self.ask("POST", "/v1/worker/lease", request), messages.LeaseReply).attempts

    async def submit(self, body: bytes, worker: str = "worker-1") -> list[messages.SubmitResult]:
        reply = await self.ask("POST", f"/v1/worker/submit?worker={worker}", body)
        return msgspec.convert(reply, messages.SubmitReply).results

    async def play(self, free: int = 4, **fields: Any) -> list[messages.Assignment]:
        """Lease attempts and submit a finished record for each."""
        attempts = await self.lease(free=free)
        results = await self.submit(submission((a, record_for(a, **fields)) for a in attempts))
        assert {result.verdict for result in results} <= {"accepted"}, results
        return attempts

    async def pull(self, run: str = "run", **fields: Any) -> Batch | messages.EmptyReply:
        body, headers = await self.pull_raw(run, **fields)
        if headers["Content-Type"] == "application/json":
            return msgspec.json.decode(body, type=messages.EmptyReply)
        return Batch.parse(
            body,
            generation=int(headers[messages.HEADER_GENERATION]),
            lease_s=float(headers[messages.HEADER_LEASE_S]),
        )

    async def pull_raw(self, run: str = "run", **fields: Any) -> tuple[bytes, Any]:
        request = {"learner": "learner", "session": "one", "request": new_id(), **fields}
        async with self.session.post(f"/v1/runs/{run}/pull", data=msgspec.json.encode(request)) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            return body, answer.headers

    async def ack(self, batch: Batch, version: str = "", *, session: str = "one", status: int = 200) -> Any:
        request = messages.AckRequest(learner="learner", session=session, generation=batch.generation, version=version)
        path = f"/v1/runs/{batch.manifest.run}/batches/{batch.id}/ack"
        return await self.ask("POST", path, request, status=status)


def record_for(assignment: messages.Assignment, **fields: Any) -> Trajectory:
    """A valid record of an attempt."""
    names = ("run", "group", "member", "episode", "attempt", "task")
    given = {name: getattr(assignment, name) for name in names}
    return make_trajectory(**{"id": new_id(), **given, **fields})


def submission(records: Iterable[tuple[messages.Assignment, Trajectory | bytes]]) -> bytes:
    """The body of a submission."""
    heads, parts = [], []
    for assignment, record in records:
        data = record if isinstance(record, bytes) else codec.encode(record)
        parts.append(data)
        heads.append(
            messages.SubmissionHead(
                episode=assignment.episode, attempt=assignment.attempt, nonce=assignment.nonce, size_bytes=len(data)
            )
        )
    text = msgspec.json.encode(heads)
    head = struct.pack("<I", len(text)) + text
    return b"".join([head, bytes(-len(head) % 64), *parts])


@asynccontextmanager
async def orchestrator(data: Path, **settings: Any) -> AsyncIterator[Api]:
    """An orchestrator in this event loop."""
    stop = asyncio.Event()
    address = asyncio.get_running_loop().create_future()
    made = Settings(**{"data": data, "port": 0, "shutdown_timeout_s": 1, **settings})
    running = asyncio.create_task(serve(made, ready=address.set_result, stop=stop))
    await asyncio.wait({running, address}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if running.done():
            running.result()
        async with aiohttp.ClientSession(address.result().url) as session:
            yield Api(session)
    finally:
        stop.set()
        await running


class Process:
    """An orchestrator as a process of its own."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: Any) -> str:
        """Start it and wait until it is ready; returns its address."""
        given = ", ".join(f"{name}={value!r}" for name, value in {"port": 0, **settings}.items())
        code = (
            "from pathlib import Path\n"
            "from headrace_orchestrator.server import run\n"
            "from headrace_orchestrator.settings import Settings\n"
            f"run(Settings(data=Path({str(self.data)!r}), {given}), ready=lambda a: print(a.url, flush=True))\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().decode().strip()
        assert url, "the orchestrator did not become ready"
        return url

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, name: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(name)

    def wait(self) -> int:
        """Its exit status."""
        assert self._process is not None
        code = self._process.wait(START_DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        elif self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def refusing_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A full disk for orchestrators in this event loop; after the block it has space again."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 0.01)
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "fdatasync", refuse)
        yield


async def until(ask: Any, *, deadline_s: float = 10.0) -> Any:
    """Repeat a check until it is true, for events that take a moment, such as a closed connection."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = await ask()
        if found:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")

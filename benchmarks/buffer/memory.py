"""Memory of the orchestrator with many small trajectories: under load, when they are submitted, pulled and acked and
stay stored; and when they are not pulled.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.buffer import ingest, load
from benchmarks.service import Service, service
from headrace import Client

ROUND, TOGETHER, CONNECTIONS = 2048, 256, 4
"""Trajectories leased together and pulled as one batch; trajectories per submission; connections for submissions."""

GROUP_SIZE = 8

RUN = "load"


class MemoryUsage(NamedTuple):
    """Resident megabytes at half of the load and at its end, and the duration of the load."""

    half_mb: float
    end_mb: float
    wall_s: float


class Submissions:
    """Submits small trajectories as a worker."""

    def __init__(self, running: Service) -> None:
        self._running = running
        self._template: load.Template | None = None

    def submit(self, count: int) -> None:
        """Lease ``count`` attempts and submit a record for each."""
        attempts = load.lease(self._running.url, count)
        self._template = self._template or load.Template.short(attempts[0])
        requests = load.submission_requests(attempts, self._template.records(attempts), TOGETHER)
        load.send(self._running.port, requests, CONNECTIONS)


class Consumer:
    """Worker and learner of one run: its groups are stored, pulled and retired."""

    def __init__(self, running: Service) -> None:
        self._running = running
        self._client = Client(running.url, keepalive=False)
        self._client.create_run(ingest.spec(RUN, ROUND))
        self._submissions = Submissions(running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def store(self, count: int) -> None:
        """Store ``count`` more trajectories, rounded up to whole batches; print the progress every few seconds."""
        stored, printed_at = 0, time.monotonic()
        while stored < count:
            self._submissions.submit(ROUND)
            self._client.ack(self._client.pull(RUN, timeout_s=60))
            stored += ROUND
            if time.monotonic() - printed_at > 5:
                printed_at = time.monotonic()
                memory_mb = self._running.resident_mb("orchestrator")
                print(f"stored {stored:,} of {count:,}; {memory_mb:.0f} MB", flush=True)


def measure_load(count: int) -> MemoryUsage:
    """Store ``count`` trajectories under load; return the memory."""
    with service() as running:
        running.start_orchestrator()
        started_at = time.monotonic()
        with Consumer(running) as consumer:
            consumer.store(count // 2)
            half_mb = running.resident_mb("orchestrator")
            consumer.store(count - count // 2)
            return MemoryUsage(half_mb, running.resident_mb("orchestrator"), time.monotonic() - started_at)


def measure_waiting(count: int) -> float:
    """Store ``count`` trajectories without pulling any; return the resident megabytes."""
    with service() as running:
        running.start_orchestrator()
        with Client(running.url, keepalive=False) as client:
            client.create_run({**ingest.spec(RUN, count), "group_size": GROUP_SIZE})
        submissions = Submissions(running)
        for start in range(0, count, ROUND):
            submissions.submit(min(ROUND, count - start))
        return running.resident_mb("orchestrator")

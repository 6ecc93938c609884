"""The orchestrator's memory: under load, with small trajectories that are leased, submitted, pulled and acked, and stay
stored; and with as many that nobody pulls.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.buffer import ingest, load
from benchmarks.service import Service, service
from headrace import Client
from headrace.common.ids import new_id

ROUND, TOGETHER, CONNECTIONS = 2048, 256, 4
"""Trajectories that are leased, submitted and pulled as one batch; how they are submitted."""

GROUP = 8

RUN = "load"


class Used(NamedTuple):
    """Resident megabytes at half of the load and at its end."""

    half_mb: float
    last_mb: float
    wall_s: float


class Consumer:
    """Stores trajectories as worker and learner of one run: groups come, are served, and retire."""

    def __init__(self, running: Service) -> None:
        self._running = running
        self._client = Client(running.url, keepalive=False)
        self._client.create_run(ingest.spec(RUN, ROUND))
        self._template: load.Template | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def store(self, count: int) -> None:
        """So many more, rounded up to whole batches; says how far it is every few seconds."""
        done, said = 0, time.monotonic()
        while done < count:
            attempts = load.lease(self._running.url, ROUND)
            self._template = self._template or load.Template.short(attempts[0])
            records = [self._template.record(attempt, new_id()) for attempt in attempts]
            load.send(self._running.port, load.requests_of(attempts, records, TOGETHER), CONNECTIONS)
            batch = self._client.pull(RUN, timeout_s=60)
            self._client.ack(batch)
            done += ROUND
            if time.monotonic() - said > 5:
                said = time.monotonic()
                print(f"stored {done:,} of {count:,}; {self._running.resident_mb('orchestrator'):.0f} MB", flush=True)


def measure(count: int) -> Used:
    """Store so many, half and half."""
    with service() as running:
        running.start_orchestrator()
        begun = time.monotonic()
        with Consumer(running) as consumer:
            consumer.store(count // 2)
            half_mb = running.resident_mb("orchestrator")
            consumer.store(count - count // 2)
            return Used(half_mb, running.resident_mb("orchestrator"), time.monotonic() - begun)


def waiting(count: int) -> float:
    """Resident megabytes once so many wait to be served, in groups of ``GROUP``."""
    with service() as running:
        running.start_orchestrator()
        with Client(running.url, keepalive=False) as client:
            client.create_run({**ingest.spec(RUN, count), "group_size": GROUP})
        template: load.Template | None = None
        done = 0
        while done < count:
            attempts = load.lease(running.url, min(ROUND, count - done))
            template = template or load.Template.short(attempts[0])
            records = [template.record(attempt, new_id()) for attempt in attempts]
            load.send(running.port, load.requests_of(attempts, records, TOGETHER), CONNECTIONS)
            done += len(attempts)
        return running.resident_mb("orchestrator")

"""Durable, acknowledged ingest over HTTP: valid trajectories of leased attempts, 37 KB each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.buffer import load
from benchmarks.service import Service
from headrace import Client
from headrace.common.ids import new_id

TRAJECTORIES = 4096
"""Of one measurement: half a second or more."""


class Ingested(NamedTuple):
    """One measurement. CPU in microseconds a trajectory."""

    per_s: float
    service_us: float
    client_us: float


def measure(running: Service, client: Client, *, together: int, connections: int) -> Ingested:
    """A fresh run of as many attempts, all leased before the clock starts."""
    run = new_id()
    client.create_run(spec(run, TRAJECTORIES))
    attempts = load.lease(running.url, TRAJECTORIES)
    template = load.Template.long(attempts[0])
    records = [template.record(attempt, new_id()) for attempt in attempts]
    requests = load.requests_of(attempts, records, together)
    before = running.cpu_s()["orchestrator"]
    sent = load.send(running.port, requests, connections)
    service_s = running.cpu_s()["orchestrator"] - before
    client.close_run(run)
    return Ingested(TRAJECTORIES / sent.wall_s, 1e6 * service_s / TRAJECTORIES, 1e6 * sent.cpu_s / TRAJECTORIES)


def spec(name: str, batch_size: int, *, max_staleness: int = 0) -> dict[str, object]:
    """A run whose attempts can all be leased at once and never run out."""
    return {
        "name": name,
        "environments": [{"id": "bench:Null"}],
        "batch_size": batch_size,
        "max_staleness": max_staleness,
        "max_concurrent": 1 << 30,
        "max_bytes": 1 << 40,
        "attempt_lease_s": load.ATTEMPT_LEASE_S,
    }

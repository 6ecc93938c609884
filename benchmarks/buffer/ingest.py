"""Durable, acknowledged ingest over HTTP of valid trajectories of leased attempts, 37 KB each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.buffer import load
from benchmarks.service import Service
from headrace import Client
from headrace.common.ids import new_id

TRAJECTORIES = 4096
"""Trajectories of one measurement, which takes half a second or more."""


class Measurement(NamedTuple):
    """Throughput, and the CPU microseconds per trajectory of service and client."""

    per_s: float
    service_us: float
    client_us: float


def measure(running: Service, client: Client, *, together: int, connections: int) -> Measurement:
    """Submit the trajectories of a fresh run, whose attempts are all leased before the clock starts."""
    run = new_id()
    client.create_run(spec(run, TRAJECTORIES))
    attempts = load.lease(running.url, TRAJECTORIES)
    records = load.Template.long(attempts[0]).records(attempts)
    requests = load.submission_requests(attempts, records, together)
    before_s = running.cpu_s()["orchestrator"]
    cost = load.send(running.port, requests, connections)
    service_s = running.cpu_s()["orchestrator"] - before_s
    client.close_run(run)
    return Measurement(TRAJECTORIES / cost.wall_s, 1e6 * service_s / TRAJECTORIES, 1e6 * cost.cpu_s / TRAJECTORIES)


def spec(name: str, batch_size: int, *, max_staleness: int = 0) -> dict[str, object]:
    """Make the spec of a run whose attempts can all be leased at once and do not expire."""
    return {
        "name": name,
        "environments": [{"id": "bench:Null"}],
        "batch_size": batch_size,
        "max_staleness": max_staleness,
        "max_concurrent": 1 << 30,
        "max_bytes": 1 << 40,
        "attempt_lease_s": load.ATTEMPT_LEASE_S,
    }

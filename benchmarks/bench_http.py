"""Gain from each optimization of the orchestrator's HTTP protocol, against an orchestrator without it.

Both orchestrators run at the same time and get their requests alternately, so other load on this machine affects both.
Submissions are measured in CPU seconds; pulls, in which the client works too, by the lower quartile of their duration.

    python -m benchmarks.bench_http
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from benchmarks import bench_pull
from benchmarks.buffer import ingest, load
from benchmarks.service import Service, service
from benchmarks.table import Row, report
from headrace import Client
from headrace.common.ids import new_id
from headrace.wire.messages import Assignment

CONNECTIONS, CHUNK, CHUNKS = 64, 256, 32
ROUNDS, PULLS = 20, 15

MAX_RATIO = 0.95
"""An optimization that saves less than 5 % is not worth its code."""


def main() -> None:
    rows = []
    for title, template in (("37 KB", load.Template.long), ("one turn", load.Template.short)):
        direct_us, task_us = measure_submissions(template)
        work = f"CPU of the service for a submission of {title}"
        rows.append(Row(work, direct_us, "µs", "with a task per request", task_us, MAX_RATIO, "lower"))
    pull_ms, single_buffers_ms, unlimited_ms = measure_pulls()
    work = f"pull of {bench_pull.TRAJECTORIES}"
    rows += [
        Row(work, pull_ms, "ms", "buffers sent one by one", single_buffers_ms, MAX_RATIO, "lower"),
        Row(work, pull_ms, "ms", "send buffer not limited", unlimited_ms, MAX_RATIO, "lower"),
    ]
    report("http", rows)


def measure_submissions(template: Callable[[Assignment], load.Template]) -> tuple[float, float]:
    """Return the CPU microseconds of a submission, answered directly and in a task of its own."""
    with ExitStack() as stack:
        both = [stack.enter_context(service()) for _ in range(2)]
        both[0].start_orchestrator()
        both[1].start_orchestrator("benchmarks.http_without", "direct")
        requests = [make_submissions(running, template) for running in both]
        cpu_s = [0.0, 0.0]
        for chunk in range(CHUNKS):
            for number in (0, 1) if chunk % 2 else (1, 0):
                before_s = both[number].cpu_s()["orchestrator"]
                batch, requests[number] = requests[number][:CHUNK], requests[number][CHUNK:]
                load.send(both[number].port, batch, CONNECTIONS)
                cpu_s[number] += both[number].cpu_s()["orchestrator"] - before_s
    direct_us, task_us = (1e6 * each / (CHUNK * CHUNKS) for each in cpu_s)
    return direct_us, task_us


def make_submissions(running: Service, template: Callable[[Assignment], load.Template]) -> list[bytes]:
    """Create a run, lease all its attempts and encode a submission for each."""
    with Client(running.url, keepalive=False) as client:
        client.create_run(ingest.spec(new_id(), CHUNK * CHUNKS))
        attempts = load.lease(running.url, CHUNK * CHUNKS)
    records = template(attempts[0]).records(attempts)
    return load.submission_requests(attempts, records, 1)


def measure_pulls() -> tuple[float, float, float]:
    """Return the milliseconds of a pull: with both optimizations, without gathered buffers, and without the limit on
    the send buffer."""
    with ExitStack() as stack:
        services = [stack.enter_context(service()) for _ in range(3)]
        services[0].start_orchestrator()
        services[1].start_orchestrator("benchmarks.http_without", "body-parts")
        services[2].start_orchestrator("benchmarks.http_without", "send-buffer")
        clients = [stack.enter_context(Client(running.url, keepalive=False)) for running in services]
        for running, client in zip(services, clients, strict=True):
            bench_pull.create_run(client, "pull", max_staleness=0)
            bench_pull.fill(running)
        seconds: list[list[float]] = [[], [], []]
        for _ in range(ROUNDS):
            for client, times in zip(clients, seconds, strict=True):
                times += time_pulls(client)
    pull_ms, single_buffers_ms, unlimited_ms = (1e3 * float(np.quantile(times, 0.25)) for times in seconds)
    return pull_ms, single_buffers_ms, unlimited_ms


def time_pulls(client: Client) -> list[float]:
    """Pull the same batch repeatedly; return the seconds of each pull."""
    seconds = []
    for _ in range(PULLS):
        started_at = time.perf_counter()
        batch = client.pull("pull", timeout_s=30)
        seconds.append(time.perf_counter() - started_at)
        client.nack(batch, "measured")
    return seconds


if __name__ == "__main__":
    main()

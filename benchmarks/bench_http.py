"""The parts of the orchestrator's HTTP protocol, each beside an orchestrator without it.

Both serve at the same time, and are asked in turns: what others do on this machine meets both. For submissions CPU
seconds count; for pulls, in which the client works too, lower quartiles of the time.

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

WINS = 0.95
"""A part that wins less than a twentieth is not worth its code."""


def main() -> None:
    rows = []
    for title, template in (("37 KB", load.Template.long), ("one turn", load.Template.short)):
        ours, theirs = submissions(template)
        title = f"CPU of the service for a submission of {title}"
        rows.append(Row(title, ours, "µs", "with a task for it", theirs, WINS, "lower"))
    ours, one_by_one, unbound = pulls()
    title = f"pull of {bench_pull.TRAJECTORIES}"
    rows += [
        Row(title, ours, "ms", "its buffers one by one", one_by_one, WINS, "lower"),
        Row(title, ours, "ms", "the kernel's send buffer", unbound, WINS, "lower"),
    ]
    report("http", rows)


def submissions(template: Callable[[Assignment], load.Template]) -> tuple[float, float]:
    """CPU microseconds of a submission, with the part and without it."""
    with ExitStack() as stack:
        both = [stack.enter_context(service()) for _ in range(2)]
        both[0].start_orchestrator()
        both[1].start_orchestrator("benchmarks.http_without", "direct")
        requests = [requests_of(running, template) for running in both]
        spent = [0.0, 0.0]
        for chunk in range(CHUNKS):
            for number in (0, 1) if chunk % 2 else (1, 0):
                before = both[number].cpu_s()["orchestrator"]
                taken, requests[number] = requests[number][:CHUNK], requests[number][CHUNK:]
                load.send(both[number].port, taken, CONNECTIONS)
                spent[number] += both[number].cpu_s()["orchestrator"] - before
    ours, theirs = (1e6 * each / (CHUNK * CHUNKS) for each in spent)
    return ours, theirs


def requests_of(running: Service, template: Callable[[Assignment], load.Template]) -> list[bytes]:
    """Submissions of attempts that were leased before."""
    with Client(running.url, keepalive=False) as client:
        client.create_run(ingest.spec(new_id(), CHUNK * CHUNKS))
        attempts = load.lease(running.url, CHUNK * CHUNKS)
    made = template(attempts[0])
    return load.requests_of(attempts, [made.record(attempt, new_id()) for attempt in attempts], 1)


def pulls() -> tuple[float, float, float]:
    """Milliseconds of a pull: as it is, and without the two parts that it goes through."""
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
            for client, found in zip(clients, seconds, strict=True):
                found += pull(client)
    ours, one_by_one, unbound = (1e3 * float(np.quantile(found, 0.25)) for found in seconds)
    return ours, one_by_one, unbound


def pull(client: Client) -> list[float]:
    """Seconds of each pull of the same batch."""
    seconds = []
    for _ in range(PULLS):
        begun = time.perf_counter()
        batch = client.pull("pull", timeout_s=30)
        seconds.append(time.perf_counter() - begun)
        client.nack(batch, "measured")
    return seconds


if __name__ == "__main__":
    main()

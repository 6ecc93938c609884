"""Time to pull 256 trajectories of 37 KB through the client, against a raw TCP transfer of as many bytes; and the time
that a training loop waits for such a batch when the client pulls ahead. The batch is already frozen, except in the row
that says otherwise.

The raw transfer also comes from another process, and is read into one existing buffer. Pulls and transfers alternate.
The figures are medians, and lower quartiles, which are more reliable on a busy machine.

    python -m benchmarks.bench_pull
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.buffer import load
from benchmarks.service import Service, service
from benchmarks.table import Row, report
from headrace import Client
from headrace.wire.codec import encode

TRAJECTORIES, ROUNDS, GROUP_SIZE = 256, 41, 8
FRESH, AHEAD, TRAIN_S = 6, 9, 0.25
"""Batches pulled for the first time; batches of the loop that pulls ahead, and the training time on each: a twentieth
of a real learner's."""

_SERVER = """
import os, socket, sys
content = memoryview(os.urandom(int(sys.argv[1])))  # zeros would come from one page that stays in the cache
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(content)
"""


def main() -> None:
    with service() as running:
        running.start_orchestrator()
        with Client(running.url, keepalive=False) as client:
            create_run(client, "pull", max_staleness=1)
            fill(running)
            pulls, raws, size = measure(client)
            client.close_run("pull")
            create_run(client, "ahead", max_staleness=FRESH + AHEAD)
            for _ in range(FRESH + AHEAD):
                fill(running)
            fresh, waits = time_fresh_pulls(client), time_prefetch_waits(client)
    print(f"body: {size / 1e6:.2f} MB; {TRAJECTORIES} trajectories of {size / TRAJECTORIES / 1e3:.1f} kB")
    raw = "raw TCP transfer"
    pull_ms, raw_ms = _quantile_ms(pulls, 0.5), _quantile_ms(raws, 0.5)
    low_ms, raw_low_ms = _quantile_ms(pulls, 0.25), _quantile_ms(raws, 0.25)
    fresh_ms, wait_ms = _quantile_ms(fresh, 0.5), _quantile_ms(waits, 0.5)
    rows = [
        Row("pull of 256 trajectories of 37 KB", pull_ms, "ms", raw, raw_ms, 1.3, "lower", 1.0),
        Row("the same, lower quartiles", low_ms, "ms", raw, raw_low_ms, 1.3, "lower", 1.0),
        Row("pull that forms its batch first", fresh_ms, "ms", raw, raw_ms, 4 * 1.3, "lower"),
        Row("wait of a loop with prefetch=1", wait_ms, "ms", "pull of a frozen batch", pull_ms, 0.1, "lower"),
    ]
    report("pull", rows)


def create_run(client: Client, name: str, max_staleness: int) -> None:
    client.create_run(
        {
            "name": name,
            "environments": [{"id": "bench:Null"}],
            "batch_size": TRAJECTORIES,
            "group_size": GROUP_SIZE,
            "max_staleness": max_staleness,
        }
    )


def time_fresh_pulls(client: Client) -> list[float]:
    """Return the seconds of pulls for which the service plans, reads, computes and freezes the batch."""
    seconds = []
    for _ in range(FRESH):
        started_at = time.perf_counter()
        batch = client.pull("ahead", timeout_s=30)
        seconds.append(time.perf_counter() - started_at)
        client.ack(batch)
    return seconds


def time_prefetch_waits(client: Client) -> list[float]:
    """Return the seconds that a loop with prefetch waits for each batch after the first."""
    waits: list[float] = []
    batches = client.batches("ahead", prefetch=1, timeout_s=30)
    batch = next(batches)
    for _ in range(AHEAD - 2):
        time.sleep(TRAIN_S)
        client.ack(batch)
        started_at = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - started_at)
    client.ack(batch)
    return waits


def _quantile_ms(seconds: Sequence[float], share: float) -> float:
    return float(np.quantile(seconds, share)) * 1e3


def measure(client: Client, rounds: int = ROUNDS) -> tuple[list[float], list[float], int]:
    """Pull and transfer alternately; return the seconds of each pull and of each transfer, and the body's bytes."""
    pulls, raws = [], []
    batch = client.pull("pull", timeout_s=30)
    size = len(batch.records)  # the head before the records adds less than 1 %
    with subprocess.Popen([sys.executable, "-c", _SERVER, str(size)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        buffer = memoryview(bytearray(size))
        with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as connection:
            for _ in range(rounds):
                client.nack(batch, "measured")
                started_at = time.perf_counter()
                batch = client.pull("pull", timeout_s=30)
                pulls.append(time.perf_counter() - started_at)
                started_at = time.perf_counter()
                connection.sendall(b"?")
                read_into(connection, buffer)
                raws.append(time.perf_counter() - started_at)
    client.nack(batch, "measured")
    return pulls, raws, size


def read_into(connection: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < len(buffer):
        received += connection.recv_into(buffer[received:])


def fill(running: Service) -> None:
    """Act as a worker: lease all attempts, and submit a long trajectory for each."""
    attempts = load.lease(running.url, TRAJECTORIES)
    records = [encode(load.long_trajectory(attempt, number)) for number, attempt in enumerate(attempts)]
    load.send(running.port, load.submission_requests(attempts, records, TRAJECTORIES), 1)


if __name__ == "__main__":
    main()

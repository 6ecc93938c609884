"""Benchmarks of the replay buffer, beside peers that keep everything in RAM. ``make bench-buffer`` runs them.

All use the same payload of 37 KB, are measured alternately in one run, and are reported as medians; only the ratios are
meaningful. The memory goals are for a million trajectories: ``--load 1000000`` measures that, and takes some minutes.

    python -m benchmarks.buffer [--rounds 7] [--parts peers,log,forming,restart,memory] [--stored 100000]
                                [--load 200000]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import bench_forming, bench_pull
from benchmarks.buffer import ingest, log, memory, restart
from benchmarks.buffer.peers import Peer
from benchmarks.service import service
from benchmarks.table import Row, report
from headrace import Client

CONNECTIONS, TOGETHER, PULLED = 64, 64, bench_pull.TRAJECTORIES

BATCHED_CONNECTIONS = 4
"""Connections of workers that submit in batches; each sends bodies of 2.4 MB."""

RESTART_S, MEMORY_MB = 2.0, 600.0
"""The project's limits."""

PARTS = ("peers", "log", "forming", "restart", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per figure (default 7)")
    parser.add_argument("--parts", default=",".join(PARTS), help="tables to measure, in this order (default: all)")
    parser.add_argument("--stored", type=int, default=100_000, help="trajectories stored at a restart (default 100000)")
    parser.add_argument("--load", type=int, default=200_000, help="trajectories of the memory rows (default 200000)")
    options = parser.parse_args()
    for part in options.parts.split(","):
        if part == "peers":
            report("buffer", peer_rows(options.rounds))
        elif part == "log":
            report("buffer_log", [append_row(options.rounds)])
        elif part == "forming":
            report("forming", bench_forming.rows(bench_forming.STORED))
        elif part == "restart":
            report("buffer_restart", [restart_row(options.stored, max(3, options.rounds // 2))])
        elif part == "memory":
            report("buffer_memory", [*memory_rows(options.load), waiting_row(options.load)])
        else:
            parser.error(f"unknown part {part!r}; the parts are {', '.join(PARTS)}")


def peer_rows(rounds: int) -> list[Row]:
    """Measure ingest and pull alternately with the peers' inserts and gets."""
    reverb, queue = Peer("reverb", "Reverb 0.14.0"), Peer("transfer_queue", "TransferQueue 0.1.8")
    singles, batched, pulls, raws = [], [], [], []
    inserts, puts, gets = [], [], []
    try:
        with service() as running:
            running.start_orchestrator()
            with Client(running.url, keepalive=False) as client:
                bench_pull.create_run(client, "pull", max_staleness=0)
                bench_pull.fill(running)
                for number in range(rounds + 1):
                    print(f"round {number} of {rounds}" + ("" if number else " (warm-up, not counted)"), flush=True)
                    singles.append(ingest.measure(running, client, together=1, connections=CONNECTIONS))
                    inserts.append(reverb.ask("insert", count=ingest.TRAJECTORIES))
                    batched.append(ingest.measure(running, client, together=TOGETHER, connections=BATCHED_CONNECTIONS))
                    puts.append(queue.ask("put", count=ingest.TRAJECTORIES, together=TOGETHER))
                    pulled, raw, _ = bench_pull.measure(client, rounds=15)
                    pulls += pulled if number else []
                    raws += raw if number else []
                    gets += [queue.ask("get", size=PULLED) for _ in range(3)] if number else []
    finally:
        reverb.close()
        queue.close()
    singles, batched, inserts, puts = singles[1:], batched[1:], inserts[1:], puts[1:]
    _print_cpu("one per request", singles)
    _print_cpu(f"{TOGETHER} per request", batched)
    for title, times in (("Reverb's", inserts), ("TransferQueue's", puts)):
        if all(times):
            cpu_us = median(1e6 * item["cpu_s"] / ingest.TRAJECTORIES for item in times)
            print(f"{title} client: {cpu_us:.0f} µs per trajectory")
    pull_ms = median(pulls) * 1e3
    return [
        Row(
            f"durable acknowledged ingest, {CONNECTIONS} connections",
            median(item.per_s for item in singles),
            "1/s",
            _peer_title(reverb, "insert (RAM)"),
            _rate(reverb, inserts),
            0.6,
            "higher",
            1.0,
        ),
        Row(
            f"durable acknowledged ingest, {TOGETHER} per request",
            median(item.per_s for item in batched),
            "1/s",
            _peer_title(queue, "kv_batch_put (RAM)"),
            _rate(queue, puts),
            0.8,
            "higher",
            1.5,
        ),
        Row(
            f"pull of {PULLED} through the client",
            pull_ms,
            "ms",
            "raw TCP transfer",
            median(raws) * 1e3,
            1.3,
            "lower",
            1.0,
        ),
        Row(
            f"pull of {PULLED} through the client",
            pull_ms,
            "ms",
            _peer_title(queue, "kv_batch_get"),
            None if queue.problem else median(item["wall_s"] for item in gets) * 1e3,
            1 / 5,
            "lower",
            round(1 / 7, 3),
        ),
    ]


def append_row(rounds: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        rates = log.measure(Path(folder), max(rounds, 5) + 1)[1:]
    return Row(
        f"log append, {log.TOGETHER} frames of 37 KB per sync",
        median(ours for ours, _ in rates),
        "1/s",
        "raw append + fdatasync",
        median(raw for _, raw in rates),
        0.9,
        "higher",
    )


def restart_row(stored: int, rounds: int) -> Row:
    seconds = median(restart.measure(stored, rounds))
    return Row(f"restart to ready, {stored:,} stored", seconds, "s", "limit", RESTART_S, 1.0, "lower")


def memory_rows(count: int) -> list[Row]:
    usage = memory.measure_load(count)
    title = f"memory, {count:,} stored in {usage.wall_s:.0f} s of load"
    return [
        Row(title, usage.end_mb, "MB", "limit", MEMORY_MB, 1.0, "lower"),
        Row("memory at the end of the load", usage.end_mb, "MB", "at half of it", usage.half_mb, 1.1, "lower"),
    ]


def waiting_row(count: int) -> Row:
    used_mb = memory.measure_waiting(count)
    return Row(f"memory, {count:,} stored and not pulled", used_mb, "MB", "limit", MEMORY_MB, 1.0, "lower")


def _peer_title(peer: Peer, operation: str) -> str:
    return f"{peer.title} {operation}" + (f": {peer.problem}" if peer.problem else "")


def _rate(peer: Peer, times: Sequence[dict[str, float]]) -> float | None:
    return None if peer.problem else median(ingest.TRAJECTORIES / item["wall_s"] for item in times)


def _print_cpu(title: str, measurements: Sequence[ingest.Measurement]) -> None:
    service_us = median(item.service_us for item in measurements)
    client_us = median(item.client_us for item in measurements)
    print(f"{title}: CPU per trajectory: service {service_us:.0f} µs, client {client_us:.0f} µs")


if __name__ == "__main__":
    main()

"""The replay buffer's numbers, beside peers that keep everything in RAM. ``make bench-buffer`` runs it.

Same payload of 37 KB, same run, in turns, medians; the ratios are what counts. The memory rows are claims about a
million trajectories: ``--load 1000000`` takes them at their word, and some minutes.

    python -m benchmarks.buffer [--rounds 7] [--parts peers,log,forming,restart,memory] [--stored 100000]
                                [--load 200000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import bench_forming, bench_pull
from benchmarks.buffer import ingest, log, memory, restart
from benchmarks.buffer.peers import Peer
from benchmarks.service import service
from benchmarks.table import Row, report
from headrace import Client

CONNECTIONS, TOGETHER, PULLED = 64, 64, bench_pull.TRAJECTORIES

BATCHED_CONNECTIONS = 4
"""Workers that submit in batches: as many bodies of 2.4 MB are under way."""

RESTART_S, MEMORY_MB = 2.0, 600.0
"""The bounds that the project sets itself."""

PARTS = ("peers", "log", "forming", "restart", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each figure (default 7)")
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables, in this order (default: all)")
    parser.add_argument("--stored", type=int, default=100_000, help="what a restart finds (default 100000)")
    parser.add_argument("--load", type=int, default=200_000, help="trajectories of the memory rows (default 200000)")
    chosen = parser.parse_args()
    for part in chosen.parts.split(","):
        if part == "peers":
            report("buffer", beside_peers(chosen.rounds))
        elif part == "log":
            report("buffer_log", [append_row(chosen.rounds)])
        elif part == "forming":
            report("forming", bench_forming.rows(bench_forming.STORED))
        elif part == "restart":
            report("buffer_restart", [restart_row(chosen.stored, max(3, chosen.rounds // 2))])
        elif part == "memory":
            report("buffer_memory", [*memory_rows(chosen.load), waiting_row(chosen.load)])
        else:
            parser.error(f"there is no part {part!r}; there are {', '.join(PARTS)}")


def beside_peers(rounds: int) -> list[Row]:
    """Ingest and pull, in turns with the peers' inserts and gets."""
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
    _print_cpu("one a request", singles)
    _print_cpu(f"{TOGETHER} a request", batched)
    for title, sent in (("Reverb's", inserts), ("TransferQueue's", puts)):
        if all(sent):
            print(f"{title} client: {_median(1e6 * item['cpu_s'] / ingest.TRAJECTORIES for item in sent):.0f} µs")
    pull_ms = _median(pulls) * 1e3
    return [
        Row(
            f"durable acknowledged ingest, {CONNECTIONS} connections",
            _median(item.per_s for item in singles),
            "1/s",
            _named(reverb, "insert (RAM)"),
            _rate(reverb, inserts),
            0.6,
            "higher",
            1.0,
        ),
        Row(
            f"durable acknowledged ingest, {TOGETHER} a request",
            _median(item.per_s for item in batched),
            "1/s",
            _named(queue, "kv_batch_put (RAM)"),
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
            _median(raws) * 1e3,
            1.3,
            "lower",
            1.0,
        ),
        Row(
            f"pull of {PULLED} through the client",
            pull_ms,
            "ms",
            _named(queue, "kv_batch_get"),
            None if queue.problem else _median(item["wall_s"] for item in gets) * 1e3,
            1 / 5,
            "lower",
            round(1 / 7, 3),
        ),
    ]


def append_row(rounds: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        found = log.measure(Path(folder), max(rounds, 5) + 1)[1:]
    return Row(
        f"log append, {log.TOGETHER} frames of 37 KB a sync",
        _median(ours for ours, _ in found),
        "1/s",
        "raw append + fdatasync",
        _median(raw for _, raw in found),
        0.9,
        "higher",
    )


def restart_row(stored: int, rounds: int) -> Row:
    found = restart.measure(stored, rounds)
    return Row(f"restart to ready, {stored:,} stored", _median(found), "s", "the bound", RESTART_S, 1.0, "lower")


def memory_rows(count: int) -> list[Row]:
    found = memory.measure(count)
    title = f"memory, {count:,} stored in {found.wall_s:.0f} s of load"
    return [
        Row(title, found.last_mb, "MB", "the bound", MEMORY_MB, 1.0, "lower"),
        Row("the same at the end of the load", found.last_mb, "MB", "at half of it", found.half_mb, 1.1, "lower"),
    ]


def waiting_row(count: int) -> Row:
    used = memory.waiting(count)
    return Row(f"memory, {count:,} wait to be served", used, "MB", "the bound", MEMORY_MB, 1.0, "lower")


def _named(peer: Peer, what: str) -> str:
    return f"{peer.title} {what}" + (f": {peer.problem}" if peer.problem else "")


def _rate(peer: Peer, sent: Sequence[dict[str, float]]) -> float | None:
    return None if peer.problem else _median(ingest.TRAJECTORIES / item["wall_s"] for item in sent)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _print_cpu(title: str, found: Sequence[ingest.Ingested]) -> None:
    service_us = _median(item.service_us for item in found)
    client_us = _median(item.client_us for item in found)
    print(f"{title}: CPU a trajectory: service {service_us:.0f} µs, client {client_us:.0f} µs")


if __name__ == "__main__":
    main()

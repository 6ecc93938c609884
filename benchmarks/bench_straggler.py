"""Throughput that 63 environments keep beside a slow one.

A worker has 64 slots, and its environments block their threads. A run of 63 concurrent episodes is measured alone and
beside a run of one episode that sleeps for a second in each turn, alternately. The figures are medians.

    python -m benchmarks.bench_straggler
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.service import count_stored, rate, service
from benchmarks.table import Row, report
from headrace import Client

ROUNDS = 5
EPISODES = 1_200


def main() -> None:
    with service() as running:
        running.start_orchestrator()
        running.start_worker("--policy", "benchmarks.null:policy", slots=64)
        with Client(running.url, keepalive=False) as client:
            client.create_run(spec("fast", turn_s=0.02, turns=4, max_concurrent=63))
            alone, beside = [], []
            for number in range(ROUNDS):
                alone.append(throughput(client))
                slow = f"slow-{number}"
                client.create_run(spec(slow, turn_s=1.0, turns=100, max_concurrent=1))
                beside.append(throughput(client))
                client.close_run(slow)
    ours, theirs = statistics.median(beside), statistics.median(alone)
    report(
        "straggler", [Row("63 environments beside one that sleeps", ours, "1/s", "without it", theirs, 0.95, "higher")]
    )


def spec(name: str, *, turn_s: float, turns: int, max_concurrent: int) -> dict[str, Any]:
    return {
        "name": name,
        "environments": [{"id": "bench:Paced", "kwargs": {"turn_s": turn_s, "turns": turns}}],
        "batch_size": 65_536,
        "max_concurrent": max_concurrent,
        "limits": {"max_turns": 200},
        "max_bytes": 8 << 30,
    }


def throughput(client: Client) -> float:
    """Episodes of the fast run per second, over the next ``EPISODES`` of them."""
    now = count_stored(client, "fast")
    return rate(lambda: count_stored(client, "fast"), first=now + 100, last=now + 100 + EPISODES)


if __name__ == "__main__":
    main()

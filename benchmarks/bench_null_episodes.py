"""Throughput of null episodes through the whole system: leased, run, validated, stored durably, counted.

Episodes have one turn and come in groups of eight. The policy is a server or part of the worker's process; a bare loop
that only sends requests to the same policy server gives the upper bound for the first.

    python -m benchmarks.bench_null_episodes [--profile]
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import aiohttp

from benchmarks.service import Service, count_stored, rate, service, wait_for
from benchmarks.table import Row, report
from headrace import Client
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER

GOAL_HTTP, GOAL_IN_PROCESS = 2_000.0, 10_000.0
"""The project's goals, in episodes per second on two cores."""

SPEC: dict[str, Any] = {
    "name": "null",
    "environments": [{"id": "bench:Null"}],
    "group_size": 8,
    "batch_size": 65_536,
    "max_staleness": 3,
    "max_bytes": 8 << 30,
}


def main() -> None:
    profile = "--profile" in sys.argv
    with service(profile=profile) as running:
        running.start_orchestrator()
        running.start_tiny_policy()
        running.start_worker("--policy-endpoint", running.policy_url, slots=128)
        over_http = measure(running, first=1_000, last=13_000)
        bare = asyncio.run(bare_requests(f"{running.policy_url}/v1/completions", 128, 8_000))
    with service(profile=profile) as running:
        running.start_orchestrator()
        for number in (0, 1):  # while one runs its episodes, the other leases and submits
            running.start_worker("--policy", "benchmarks.null:policy", slots=1024, name=f"worker-{number}")
        in_process = measure(running, first=5_000, last=65_000)
    report(
        "null_episodes",
        [
            Row("null episodes, policy over HTTP", over_http, "1/s", "the goal", GOAL_HTTP, 1.0, "higher"),
            Row("null episodes, policy over HTTP", over_http, "1/s", "bare requests to it", bare, 0.5, "higher"),
            Row("null episodes, policy in process", in_process, "1/s", "the goal", GOAL_IN_PROCESS, 1.0, "higher"),
        ],
    )


def measure(running: Service, *, first: int, last: int) -> float:
    """Return the episodes per second of a fresh run; print the CPU time that each process used."""
    with Client(running.url, keepalive=False) as client:
        wait_for("the workers", lambda: len(client.status().workers) == running.workers)
        client.create_run(SPEC)
        before = running.cpu_s()
        per_s = rate(lambda: count_stored(client, "null"), first=first, last=last)
        count = count_stored(client, "null")
        cpu_us = {name: 1e6 * (now - before[name]) / count for name, now in running.cpu_s().items()}
        print("CPU per episode: " + ", ".join(f"{name} {each:.0f} µs" for name, each in cpu_us.items()))
        return per_s


async def bare_requests(url: str, connections: int, count: int) -> float:
    """Return the requests per second of a loop that does nothing else."""
    prompt = [BOS, USER, ord("?"), END, ASSISTANT]
    body = {"model": "policy", "prompt": prompt, "max_tokens": 16, "logprobs": 0, "return_token_ids": True}
    remaining = count
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:

        async def ask() -> None:
            nonlocal remaining
            while remaining > 0:
                remaining -= 1
                async with session.post(url, json=body) as answer:
                    await answer.json()

        started_at = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(connections)))
        return count / (time.perf_counter() - started_at)


if __name__ == "__main__":
    main()

"""Null episodes through the whole path: dispatched, played, validated, stored durably, counted.

One turn each, in groups of eight. With the policy over HTTP, and with one in the worker's process; beside them a bare
loop that only asks the same policy server, which is the ceiling of the first.

    python -m benchmarks.bench_null_episodes [--profile]
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import aiohttp

from benchmarks.service import Service, rate, service, stored, wait_for
from benchmarks.table import Row, report
from headrace import Client
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER

REACH_HTTP, REACH_IN_PROCESS = 2_000.0, 10_000.0
"""Episodes per second on two cores that the project sets itself."""

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
        for number in (0, 1):  # while one runs its episodes, the other leases and hands in
            running.start_worker("--policy", "benchmarks.null:policy", slots=1024, name=f"worker-{number}")
        in_process = measure(running, first=5_000, last=65_000)
    report(
        "null_episodes",
        [
            Row("null episodes, policy over HTTP", over_http, "1/s", "the goal", REACH_HTTP, 1.0, "higher"),
            Row("null episodes, policy over HTTP", over_http, "1/s", "bare requests to it", bare, 0.5, "higher"),
            Row("null episodes, policy in process", in_process, "1/s", "the goal", REACH_IN_PROCESS, 1.0, "higher"),
        ],
    )


def measure(running: Service, *, first: int, last: int) -> float:
    """Episodes per second of a fresh run; prints where the CPU time went."""
    with Client(running.url, keepalive=False) as client:
        wait_for("the workers", lambda: len(client.status().workers) == running.workers)
        client.create_run(SPEC)
        before = running.cpu_s()
        found = rate(lambda: stored(client, "null"), first=first, last=last)
        count = stored(client, "null")
        spent = {name: 1e6 * (now - before[name]) / count for name, now in running.cpu_s().items()}
        print("CPU per episode: " + ", ".join(f"{name} {each:.0f} µs" for name, each in spent.items()))
        return found


async def bare_requests(url: str, connections: int, count: int) -> float:
    """Requests per second of a loop that does nothing else."""
    prompt = [BOS, USER, ord("?"), END, ASSISTANT]
    body = {"model": "policy", "prompt": prompt, "max_tokens": 16, "logprobs": 0, "return_token_ids": True}
    left = count
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:

        async def ask() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                async with session.post(url, json=body) as answer:
                    await answer.json()

        begun = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(connections)))
        return count / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()

"""Tokens per second of a real vLLM under Headrace's whole path, and under a raw asynchronous load generator.

The generator sends the requests that Headrace sent, taken from the stored records, as many at a time, turn by turn.
Both take turns, so that both meet the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.policy.vllm import AT_ONCE, TOKENS, TURNS_DONE, Vllm, spec
from benchmarks.service import Service, wait_for
from benchmarks.table import Row
from headrace import Client
from headrace.engine import GENERATE

ROUNDS, WARM_S, MEASURED_S = 5, 2.0, 10.0
EPISODES = 200

Requests = list[list[dict[str, Any]]]
"""Bodies, by episode and turn."""


def rows(running: Service, client: Client, server: Vllm) -> list[Row]:
    ours, raw = [], []
    requests: Requests = []
    spent: dict[str, float] = {}
    for number in range(ROUNDS):
        name = f"load-{number}"
        client.create_run(spec(name, server))
        before, turns = running.cpu_s(), server.metric(TURNS_DONE)
        ours.append(server.tokens_per_s(WARM_S, MEASURED_S))
        turns = server.metric(TURNS_DONE) - turns
        spent = {part: 1e3 * (cpu_s - before[part]) / turns for part, cpu_s in running.cpu_s().items()}
        requests = requests or _requests(client, name, server)
        client.close_run(name)
        server.until_idle()
        raw.append(uvloop.run(_raw(server, requests)))
        server.until_idle()
        (mine, mine_running), (other, other_running) = ours[-1], raw[-1]
        print(f"round {number + 1}: Headrace {mine:.0f} tokens/s with {mine_running:.0f} requests running, ", end="")
        print(f"load generator {other:.0f} with {other_running:.0f}", flush=True)
    pairs = sorted(mine / other for (mine, _), (other, _) in zip(ours, raw, strict=True))
    print("CPU per turn, last round: " + ", ".join(f"{name} {each:.2f} ms" for name, each in spent.items()))
    print("ratios: " + ", ".join(f"{ratio:.3f}" for ratio in pairs))
    return [
        Row(
            "tokens, 64 episodes in flight",
            median(rate for rate, _ in ours),
            "1/s",
            "raw load generator",
            median(rate for rate, _ in raw),
            0.95,
            "higher",
        )
    ]


def _requests(client: Client, run: str, server: Vllm) -> Requests:
    wait_for("episodes", lambda: client.run(run).episodes.get("finished", 0) >= AT_ONCE, timeout_s=120)
    found = []
    for summary in itertools.islice(client.trajectories(run, status="finished"), EPISODES):
        turns = [
            {
                "model": "policy",
                "token_ids": segment.token_ids[: turn.start].tolist(),
                "sampling_params": {
                    "max_tokens": TOKENS,
                    "temperature": 1.0,
                    "seed": len(found) + turn.index,
                    "stop_token_ids": _stops(server),
                    "logprobs": 0,
                },
            }
            for segment in client.trajectory(summary.id).rows()
            for turn in segment.turns
        ]
        found.append(turns)
    return found


def _stops(server: Vllm) -> list[int]:
    config = msgspec.json.decode((server.model / "config.json").read_bytes())
    return [config["eos_token_id"]]


async def _raw(server: Vllm, requests: Requests) -> tuple[float, float]:
    episodes = itertools.cycle(requests)
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work() -> None:
            while True:
                for body in next(episodes):
                    data = msgspec.json.encode(body)
                    headers = {"Content-Type": "application/json"}
                    async with session.post(f"{server.address}{GENERATE}", data=data, headers=headers) as answer:
                        msgspec.json.decode(await answer.read())

        load = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            return await asyncio.to_thread(server.tokens_per_s, WARM_S, MEASURED_S)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)

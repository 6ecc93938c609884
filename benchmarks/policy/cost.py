"""Cost of the policy client: CPU per turn beside a bare request, and turns per second of one process.

Both use the tiny policy in a separate process, with 64 concurrent turns. They are measured alternately, so that other
load on this machine affects both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import NamedTuple

import aiohttp
import uvloop

from benchmarks.service import service
from benchmarks.table import Row
from headrace.trajectory import Sampling
from headrace.wire.policy_server import GENERATE
from headrace_workers.policies.base import SampleRequest
from headrace_workers.policies.http_policies import ServedPolicies
from headrace_workers.renderers.bytes_renderer import ASSISTANT, BOS, END, USER, VOCAB_SIZE

TURNS, AT_ONCE, ROUNDS = 3_000, 64, 5

PROMPT = [BOS, USER, *b"I have chosen a secret client number from 1 to 50. Guess it, boxed." * 4, END, ASSISTANT]


class TurnCost(NamedTuple):
    """CPU time and duration per turn."""

    cpu_s: float
    wall_s: float


def rows() -> list[Row]:
    with service() as running:
        running.start_tiny_policy()
        bare, client = uvloop.run(_measure(running.policy_url))
    client_ms, bare_ms = (1e3 * median(cost.cpu_s for cost in costs) for costs in (client, bare))
    print(f"CPU per turn: client {client_ms:.2f} ms, a bare aiohttp request {bare_ms:.2f} ms")
    rate, bare_rate = (1 / min(cost.wall_s for cost in costs) for costs in (client, bare))
    return [
        Row("CPU of the client", client_ms, "ms/turn", "goal", 0.6, 1.0, "lower"),
        Row("turns of one process, with the tiny policy", rate, "1/s", "goal", 1500, 1.0, "higher"),
        Row("turns of one process, with the tiny policy", rate, "1/s", "bare requests", bare_rate, 0.9, "higher"),
    ]


async def _measure(address: str) -> tuple[list[TurnCost], list[TurnCost]]:
    policies = ServedPolicies(default_endpoints=[address], clock=time.monotonic)
    bare: list[TurnCost] = []
    client: list[TurnCost] = []
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
            policy = policies.at(())

            async def send(number: int) -> None:
                body = {"model": "policy", "token_ids": PROMPT, "sampling_params": {"max_tokens": 64, "logprobs": 0}}
                async with session.post(f"{address}{GENERATE}", json=body) as answer:
                    await answer.json()

            async def sample(number: int) -> None:
                await policy.sample(_sample_request(number))

            for _ in range(ROUNDS):
                bare.append(await _run_turns(send))
                client.append(await _run_turns(sample))
    finally:
        await policies.close()
    return bare, client


async def _run_turns(run_turn: Callable[[int], Awaitable[None]]) -> TurnCost:
    numbers = iter(range(TURNS))

    async def work() -> None:
        for number in numbers:
            await run_turn(number)

    cpu_before_s, started_at = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return TurnCost((time.process_time() - cpu_before_s) / TURNS, (time.perf_counter() - started_at) / TURNS)


def _sample_request(number: int) -> SampleRequest:
    return SampleRequest(
        id=f"e{number}-1-0",
        group=f"g{number // 8}",
        episode=f"e{number}",
        model="policy",
        prompt=PROMPT,
        sampling=Sampling(temperature=1.0, top_p=1.0, seed=number),
        max_tokens=64,
        stop=(),
        stop_token_ids=(END,),
        timeout_s=60.0,
        vocab_size=VOCAB_SIZE,
    )

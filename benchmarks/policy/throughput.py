"""Tokens per second of a real vLLM under load from Headrace, and from a raw asynchronous load generator.

* The generator sends the requests that Headrace sent, taken from the stored records, with the same concurrency.
* Both use the same warm engine: the first round does not count.
* They alternate, and so does their order. Rounds in which other processes used much CPU time are not meaningful, so
  only the least disturbed rounds count.
"""

from __future__ import annotations

import asyncio
import itertools
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import msgspec
import uvloop

from benchmarks.policy.vllm import AT_ONCE, TOKENS, TURNS_DONE, Vllm, spec
from benchmarks.processors import others_s
from benchmarks.service import Service, wait_for
from benchmarks.table import Row
from headrace import Client
from headrace.wire.policy_server import GENERATE

ROUNDS, MAX_ROUNDS = 10, 20
"""Rounds that count, and the limit on rounds until as many were quiet."""

QUIET_PROCESSORS = 0.1
"""Processors that other processes may use in a quiet round."""

WARM_S, MEASURED_S = 1.0, 6.0
EPISODES = 200

Requests = list[list[dict[str, Any]]]
"""Request bodies, by episode and turn."""


class LoadResult(NamedTuple):
    """Result of one load. ``running``: mean number of concurrent requests; ``others``: processors that other processes
    used meanwhile."""

    tokens_per_s: float
    running: float
    others: float


class Round(NamedTuple):
    """Results of one load from Headrace and one from the generator."""

    ours: LoadResult
    raw: LoadResult

    @property
    def ratio(self) -> float:
        return self.ours.tokens_per_s / self.raw.tokens_per_s

    @property
    def others(self) -> float:
        return max(self.ours.others, self.raw.others)


def rows(running: Service, client: Client, server: Vllm) -> list[Row]:
    loads = _Loads(running, client, server)
    loads.run_round(0)
    rounds: list[Round] = []
    while len(rounds) < MAX_ROUNDS and sum(each.others <= QUIET_PROCESSORS for each in rounds) < ROUNDS:
        rounds.append(loads.run_round(len(rounds) + 1))
        _print_round(len(rounds), rounds[-1])
    counted = sorted(rounds, key=lambda each: each.others)[:ROUNDS]
    print("CPU per turn: " + ", ".join(f"{name} {1e3 * median(each):.2f} ms" for name, each in loads.cpu_s.items()))
    print(f"{len(counted)} of {len(rounds)} rounds count; others used up to {counted[-1].others:.2f} processors")
    ratios = sorted(each.ratio for each in counted)
    print(f"ratios: {', '.join(f'{ratio:.3f}' for ratio in ratios)}, median {median(ratios):.3f}")
    return [
        Row(
            "tokens, 64 episodes in flight",
            median(each.ours.tokens_per_s for each in counted),
            "1/s",
            "raw load generator",
            median(each.raw.tokens_per_s for each in counted),
            0.95,
            "higher",
        )
    ]


def _print_round(number: int, each: Round) -> None:
    results = (
        f"{name} {load.tokens_per_s:.0f} tokens/s with {load.running:.0f} requests running"
        for name, load in (("Headrace", each.ours), ("load generator", each.raw))
    )
    print(f"round {number}: {', '.join(results)}, others used {each.others:.2f} processors", flush=True)


class _Loads:
    """Loads the server with Headrace and with the generator. ``cpu_s``: CPU seconds per turn by process, for each load
    from Headrace."""

    def __init__(self, running: Service, client: Client, server: Vllm) -> None:
        self._running, self._client, self._server = running, client, server
        self._requests: Requests = []
        self.cpu_s: dict[str, list[float]] = {}

    def run_round(self, number: int) -> Round:
        """Run one load of each kind; in odd rounds the generator is first."""
        if number % 2:
            raw = self._raw()
            return Round(self._ours(number), raw)
        return Round(self._ours(number), self._raw())

    def _ours(self, number: int) -> LoadResult:
        name, client, server = f"load-{number}", self._client, self._server
        client.create_run(spec(name, server))
        before, turns = self._running.cpu_s(), server.metric(TURNS_DONE)
        result = _measure(server)
        turns = server.metric(TURNS_DONE) - turns
        for part, cpu_s in self._running.cpu_s().items():
            self.cpu_s.setdefault(part, []).append((cpu_s - before[part]) / turns)
        self._requests = self._requests or _recorded_requests(client, name, server)
        client.close_run(name)
        server.wait_until_idle()
        return result

    def _raw(self) -> LoadResult:
        result = uvloop.run(_generate_load(self._server, self._requests))
        self._server.wait_until_idle()
        return result


def _measure(server: Vllm) -> LoadResult:
    others_cpu_s: list[float] = []
    rate = server.measure_rate(WARM_S, MEASURED_S, lambda: others_cpu_s.append(others_s()))
    return LoadResult(rate.tokens_per_s, rate.running, (others_cpu_s[1] - others_cpu_s[0]) / rate.wall_s)


def _recorded_requests(client: Client, run: str, server: Vllm) -> Requests:
    """Make the requests of the finished episodes of a run."""
    wait_for("episodes", lambda: client.run(run).episodes.get("finished", 0) >= AT_ONCE, timeout_s=120)
    requests: Requests = []
    for summary in itertools.islice(client.trajectories(run, status="finished"), EPISODES):
        turns = [
            {
                "model": "policy",
                "token_ids": segment.token_ids[: turn.start].tolist(),
                "sampling_params": {
                    "max_tokens": TOKENS,
                    "temperature": 1.0,
                    "seed": len(requests) + turn.index,
                    "stop_token_ids": _stop_token_ids(server),
                    "logprobs": 0,
                },
            }
            for segment in client.trajectory(summary.id).rows()
            for turn in segment.turns
        ]
        requests.append(turns)
    return requests


def _stop_token_ids(server: Vllm) -> list[int]:
    config = msgspec.json.decode((server.model / "config.json").read_bytes())
    return [config["eos_token_id"]]


async def _generate_load(server: Vllm, requests: Requests) -> LoadResult:
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

        tasks = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            return await asyncio.to_thread(_measure, server)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

"""Tokens per second of a real vLLM under Headrace's whole path, and under a raw asynchronous load generator.

* The generator sends the requests that Headrace sent, taken from the stored records, as many at a time, turn by turn.
* Both meet the same engine, warm for both: a first round is not counted.
* Both meet the same machine: they take turns, and take turns at being first. A round in which other processes had much
  of the processors says nothing about either; of many rounds those count that were disturbed least.
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

ROUNDS, MOST_ROUNDS = 10, 20
"""Rounds that count, and rounds at most until so many were quiet."""

QUIET = 0.1
"""Processors that others may use in a quiet round."""

WARM_S, MEASURED_S = 1.0, 6.0
EPISODES = 200

Requests = list[list[dict[str, Any]]]
"""Bodies, by episode and turn."""


class Load(NamedTuple):
    """What a load came to. ``others``: processors that processes of others used meanwhile."""

    tokens_per_s: float
    running: float
    others: float


class Round(NamedTuple):
    ours: Load
    raw: Load

    @property
    def ratio(self) -> float:
        return self.ours.tokens_per_s / self.raw.tokens_per_s

    @property
    def others(self) -> float:
        return max(self.ours.others, self.raw.others)


def rows(running: Service, client: Client, server: Vllm) -> list[Row]:
    both = _Both(running, client, server)
    both.round(0)
    rounds: list[Round] = []
    while len(rounds) < MOST_ROUNDS and sum(each.others <= QUIET for each in rounds) < ROUNDS:
        rounds.append(both.round(len(rounds) + 1))
        _say(len(rounds), rounds[-1])
    counted = sorted(rounds, key=lambda each: each.others)[:ROUNDS]
    print("CPU per turn: " + ", ".join(f"{name} {1e3 * median(each):.2f} ms" for name, each in both.cpu_s.items()))
    print(
        f"{len(counted)} of {len(rounds)} rounds count; others used up to {counted[-1].others:.2f} processors in them"
    )
    print("ratios: " + ", ".join(f"{ratio:.3f}" for ratio in sorted(each.ratio for each in counted)), end="")
    print(f", their median {median(each.ratio for each in counted):.3f}")
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


def _say(number: int, each: Round) -> None:
    shown = (
        f"{name} {load.tokens_per_s:.0f} tokens/s with {load.running:.0f} requests running"
        for name, load in (("Headrace", each.ours), ("load generator", each.raw))
    )
    print(f"round {number}: {', '.join(shown)}, others used {each.others:.2f} processors", flush=True)


class _Both:
    """Loads the server in one way and the other. ``cpu_s``: of one turn, in each load of Headrace's, by process."""

    def __init__(self, running: Service, client: Client, server: Vllm) -> None:
        self._running, self._client, self._server = running, client, server
        self._requests: Requests = []
        self.cpu_s: dict[str, list[float]] = {}

    def round(self, number: int) -> Round:
        """One of each; every other time the generator is first."""
        if number % 2:
            raw = self._raw()
            return Round(self._ours(number), raw)
        return Round(self._ours(number), self._raw())

    def _ours(self, number: int) -> Load:
        name, client, server = f"load-{number}", self._client, self._server
        client.create_run(spec(name, server))
        before, turns = self._running.cpu_s(), server.metric(TURNS_DONE)
        load = _measured(server)
        turns = server.metric(TURNS_DONE) - turns
        for part, cpu_s in self._running.cpu_s().items():
            self.cpu_s.setdefault(part, []).append((cpu_s - before[part]) / turns)
        self._requests = self._requests or _requests(client, name, server)
        client.close_run(name)
        server.until_idle()
        return load

    def _raw(self) -> Load:
        load = uvloop.run(_raw(self._server, self._requests))
        self._server.until_idle()
        return load


def _measured(server: Vllm) -> Load:
    used_s: list[float] = []
    tokens_per_s, running, took_s = server.tokens_per_s(WARM_S, MEASURED_S, lambda: used_s.append(others_s()))
    return Load(tokens_per_s, running, (used_s[1] - used_s[0]) / took_s)


def _requests(client: Client, run: str, server: Vllm) -> Requests:
    wait_for("episodes", lambda: client.run(run).episodes.get("finished", 0) >= AT_ONCE, timeout_s=120)
    found: Requests = []
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


async def _raw(server: Vllm, requests: Requests) -> Load:
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
            return await asyncio.to_thread(_measured, server)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)

"""Client of the vLLM server of a benchmark, and the spec of the run that loads it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.service import wait_for

AT_ONCE = 64
"""Concurrent episodes, and thus concurrent requests."""

TURNS, TOKENS = 3, 80
"""Turns of an episode, and the limit on tokens of a turn. About one token in 300 ends a turn earlier."""

RISE_S = 60.0
"""Longest wait for the full load: a fresh run starts slowly, by design."""

RUNNING, TOKENS_SAMPLED, TURNS_DONE = (
    "vllm:num_requests_running",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LoadRate(NamedTuple):
    """Rate of a server under load: sampled tokens per second, mean concurrent requests, and the measured seconds."""

    tokens_per_s: float
    running: float
    wall_s: float


class Vllm:
    """Client of a vLLM server."""

    def __init__(self, address: str, model: Path) -> None:
        self.address, self.model = address, model

    def post(self, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"})
        with _opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())

    def get(self, path: str) -> bytes:
        with _opener.open(f"{self.address}{path}", timeout=60) as answer:
            return bytes(answer.read())

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def version(self) -> str:
        return str(json.loads(self.get("/weight_info"))["weight_version"])

    def measure_rate(self, warm_s: float, measured_s: float, on_edge: Callable[[], object] = lambda: None) -> LoadRate:
        """Wait for nearly the full load, then ``warm_s`` longer, and measure by the server's own metrics. ``on_edge``
        is called at the start and at the end of the measurement."""
        deadline = time.monotonic() + RISE_S
        while self.metric(RUNNING) < 0.9 * AT_ONCE and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(warm_s)
        on_edge()
        started_at, before, running = time.perf_counter(), self.metric(TOKENS_SAMPLED), []
        while time.perf_counter() - started_at < measured_s:
            running.append(self.metric(RUNNING))
            time.sleep(0.5)
        tokens, wall_s = self.metric(TOKENS_SAMPLED) - before, time.perf_counter() - started_at
        on_edge()
        return LoadRate(tokens / wall_s, sum(running) / len(running), wall_s)

    def wait_until_idle(self) -> None:
        wait_for("an idle engine", lambda: self.metric(RUNNING) == 0)


def spec(name: str, server: Vllm) -> dict[str, Any]:
    """Make the spec of a run of conversations that are not pulled and do not become stale."""
    return {
        "name": name,
        "environments": [{"id": "bench:Talk", "kwargs": {"turns": TURNS}}],
        "policy": {"endpoints": [server.address], "renderer": "template", "tokenizer": str(server.model)},
        "sampling": {"max_tokens": TOKENS},
        "group_size": 8,
        "batch_size": 65_536,
        "max_staleness": 1_000,
        "max_bytes": 8 << 30,
    }

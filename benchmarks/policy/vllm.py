"""Short calls to the vLLM server of a benchmark, and the run that loads it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.service import wait_for

AT_ONCE = 64
"""Episodes in flight, and so requests."""

TURNS, TOKENS = 3, 80
"""Of an episode, and at most of a turn. The model ends a turn in one of 300 tokens by itself."""

RISE_S = 60.0

RUNNING, TOKENS_MADE, TURNS_DONE = (
    "vllm:num_requests_running",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Vllm:
    def __init__(self, address: str, model: Path) -> None:
        self.address, self.model = address, model

    def post(self, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}{path}", data, {"Content-Type": "application/json"})
        with _opener.open(request, timeout=60) as answer:
            return json.loads(answer.read())

    def get(self, path: str) -> bytes:
        with _opener.open(f"{self.address}{path}", timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def version(self) -> str:
        answer: str = json.loads(self.get("/weight_info"))["weight_version"]
        return answer

    def tokens_per_s(
        self, warm_s: float, measured_s: float, look: Callable[[], object] = lambda: None
    ) -> tuple[float, float, float]:
        """What it samples, by its own count, and how many requests it works on at a time, once it is loaded; and for
        how many seconds that was measured. ``look`` is called as they begin and as they end.

        Loaded is ``warm_s`` after it has nearly all that may be in flight, or after ``RISE_S``: a fresh run starts
        slowly, by design.
        """
        deadline = time.monotonic() + RISE_S
        while self.metric(RUNNING) < 0.9 * AT_ONCE and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(warm_s)
        look()
        begun, before, running = time.perf_counter(), self.metric(TOKENS_MADE), []
        while time.perf_counter() - begun < measured_s:
            running.append(self.metric(RUNNING))
            time.sleep(0.5)
        tokens, took_s = self.metric(TOKENS_MADE) - before, time.perf_counter() - begun
        look()
        return tokens / took_s, sum(running) / len(running), took_s

    def until_idle(self) -> None:
        wait_for("an idle engine", lambda: self.metric(RUNNING) == 0)


def spec(name: str, server: Vllm) -> dict[str, Any]:
    """A run of episodes that only talk; nobody pulls, and nothing grows stale."""
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

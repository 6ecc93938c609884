"""Duration of a restart after a kill, with many small trajectories in the data directory."""

from __future__ import annotations

import time

from benchmarks.buffer.memory import Consumer
from benchmarks.service import service


def measure(stored: int, rounds: int) -> list[float]:
    """Kill the orchestrator with SIGKILL and restart it; return the seconds until it is ready, by round."""
    seconds = []
    with service() as running:
        running.start_orchestrator()
        with Consumer(running) as consumer:
            consumer.store(stored)
        for _ in range(rounds):
            running.kill("orchestrator")
            started_at = time.perf_counter()
            running.start_orchestrator()
            seconds.append(time.perf_counter() - started_at)
            cpu_s = running.cpu_s()["orchestrator"]
            print(f"restart: {seconds[-1]:.2f} s, CPU {cpu_s:.2f} s including imports", flush=True)
    return seconds

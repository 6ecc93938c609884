"""A restart to ready: the process is killed under a data directory that holds many small trajectories."""

from __future__ import annotations

import time

from benchmarks.buffer.memory import Consumer
from benchmarks.service import service


def measure(stored: int, rounds: int) -> list[float]:
    """Seconds from the start of a process until it answers as ready, each after a kill -9."""
    found = []
    with service() as running:
        running.start_orchestrator()
        with Consumer(running) as consumer:
            consumer.store(stored)
        for _ in range(rounds):
            running.kill("orchestrator")
            begun = time.perf_counter()
            running.start_orchestrator()
            found.append(time.perf_counter() - begun)
            cpu_s = running.cpu_s()["orchestrator"]
            print(f"restart: {found[-1]:.2f} s, of CPU {cpu_s:.2f} s, imports included", flush=True)
    return found

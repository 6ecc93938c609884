"""Weight updates of a real vLLM under load: their duration, lost episodes, and exactness.

* A learner writes the weights of each version into a new folder and announces it; the service loads them.
* After each update the logprobs of a greedy sample must match a PyTorch forward pass with that folder's weights, and
  the sample must differ from the previous one.
* At the end no episode has failed. In a sample of the stored records, preferably with several versions, the logprobs of
  each version's span match a PyTorch forward pass with that version's weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.policy.vllm import Vllm, spec
from benchmarks.service import wait_for
from benchmarks.table import Row
from examples.tiny_model import WEIGHTS, read, write
from headrace import Client, Trajectory, Version
from headrace.wire.policy_server import GENERATE

UPDATES, MANUAL_UPDATES, MAX_CHECKED_RECORDS = 50, 9, 60
TOLERANCE = 1e-3

Logprobs = Callable[[Path, list[int]], list[float]]
"""Computes the logprob of each token except the first, with the weights of a folder."""


def rows(client: Client, server: Vllm, forward: Logprobs, folder: Path) -> list[Row]:
    folders = _write_versions(server.model, folder)
    client.create_run(spec("updates", server))
    server.measure_rate(warm_s=3.0, measured_s=1.0)
    manual = [_time_manual_update(server, folders[number % 2]) for number in range(MANUAL_UPDATES)]
    _time_manual_update(server, folders[0])
    seconds, exact, worst = [], 0, 0.0
    previous_ids: list[int] = []
    for n in range(1, UPDATES + 1):
        started_at = time.perf_counter()
        client.announce("updates", Version(0, n), weights=str(folders[n]))
        wait_for(f"version {n}", partial(_serves, server, n), timeout_s=60, interval_s=0.005)
        seconds.append(time.perf_counter() - started_at)
        ids, logprobs = _sample_greedily(server)
        difference = _max_difference(logprobs, forward(folders[n], PROMPT + ids)[len(PROMPT) - 1 :])
        exact += ids != previous_ids and difference < TOLERANCE
        previous_ids, worst = ids, max(worst, difference)
        if n % 10 == 0:
            print(f"{n} of {UPDATES} updates", flush=True)
    client.close_run("updates")
    server.wait_until_idle()
    episodes = client.run("updates").episodes
    worst_stored = _check_records(client, folders, forward)
    update_ms, longest_ms, manual_ms = 1e3 * median(seconds), 1e3 * max(seconds), 1e3 * median(manual)
    print(f"episodes: {episodes}")
    print(f"median update {update_ms:.0f} ms (longest {longest_ms:.0f} ms), vLLM's own part {manual_ms:.0f} ms")
    return [
        Row("weight update, beyond vLLM's part", (update_ms - manual_ms) / 1e3, "s", "goal", 1.0, 1.0, "lower"),
        Row("episodes lost in 50 updates", float(episodes.get("failed", 0)), "", "goal (0)", 1.0, 0.0, "lower"),
        Row("updates with changed and exact output", float(exact), "", "all", float(UPDATES), 1.0, "higher"),
        Row("error of sampled logprobs against PyTorch", worst, "nats", "goal", TOLERANCE, 1.0, "lower"),
        Row("error of stored logprobs against PyTorch", worst_stored, "nats", "goal", TOLERANCE, 1.0, "lower"),
    ]


PROMPT = [*b"What comes next?"]


def _write_versions(model: Path, folder: Path) -> list[Path]:
    """Write the weights of each version: those of version 0 with noise, a larger step than a learner makes."""
    first = read(model / WEIGHTS)
    folders = [model]
    for n in range(1, UPDATES + 1):
        random = np.random.default_rng(n)
        noise = {name: random.normal(0.0, 0.03, tensor.shape).astype(np.float32) for name, tensor in first.items()}
        folders.append(folder / f"0.{n}")
        folders[-1].mkdir(parents=True)
        write(folders[-1] / WEIGHTS, {name: tensor + noise[name] for name, tensor in first.items()})
        (folders[-1] / "config.json").write_bytes((model / "config.json").read_bytes())
    return folders


def _time_manual_update(server: Vllm, folder: Path) -> float:
    """Update the weights with only the calls to vLLM that the service makes; return the seconds."""
    started_at = time.perf_counter()
    server.post("/pause?mode=keep&clear_cache=true")
    server.post("/collective_rpc", {"method": "headrace_load", "args": [str(folder)]})
    server.post("/resume")
    return time.perf_counter() - started_at


def _serves(server: Vllm, n: int) -> bool:
    return server.version() == f"updates@0.{n}" and b"false" in server.get("/is_paused")


def _sample_greedily(server: Vllm) -> tuple[list[int], list[float]]:
    sampling = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    answer = server.post(GENERATE, {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling})
    choice: Any = answer["choices"][0]
    return choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]]


def _check_records(client: Client, folders: list[Path], forward: Logprobs) -> float:
    """Check the logprobs of stored records, those with several versions first; return the largest difference."""
    summaries = sorted(client.trajectories("updates", status="finished"), key=lambda each: each.low == each.high)
    differences, mixed = [0.0], 0
    for summary in summaries[:MAX_CHECKED_RECORDS]:
        mixed += summary.low != summary.high
        differences += _span_differences(client.trajectory(summary.id), folders, forward)
    print(f"checked {len(differences) - 1} spans; {mixed} records have several versions")
    return max(differences)


def _span_differences(record: Trajectory, folders: list[Path], forward: Logprobs) -> list[float]:
    """Compare the logprobs of each version's span with a forward pass; return the largest difference of each."""
    differences = []
    for segment in record.rows():
        start = 0
        for run in segment.versions:
            sampled = [at for at in range(max(start, 1), run.end) if segment.sampled[at]]
            if sampled:
                expected = forward(folders[run.n], segment.token_ids[: run.end].tolist())
                stored = [float(segment.logprobs[at]) for at in sampled]
                differences.append(_max_difference(stored, [expected[at - 1] for at in sampled]))
            start = run.end
    return differences


def _max_difference(logprobs: list[float], expected: list[float]) -> float:
    return float(np.abs(np.array(logprobs) - np.array(expected)).max())

"""Weight updates of a real vLLM under load: how long they take, that none loses an episode, that each is exact.

* A learner writes the weights of each version into a folder of their own and announces it; the service does the rest.
* After each update a greedy probe must say what a PyTorch forward of that folder says, and not what it said before.
* In the end no episode has failed, and in a sample of the stored records, those with several versions first, each
  version's span has the logprobs of a PyTorch forward of that version's weights.
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

UPDATES, BY_HAND, CHECKED = 50, 9, 60
CLOSE = 1e-3

Logprobs = Callable[[Path, list[int]], list[float]]
"""Of each token but the first, under the weights of a folder."""


def rows(client: Client, server: Vllm, forward: Logprobs, folder: Path) -> list[Row]:
    folders = _folders(server.model, folder)
    client.create_run(spec("updates", server))
    server.tokens_per_s(warm_s=3.0, measured_s=1.0)
    by_hand = [_by_hand(server, folders[number % 2]) for number in range(BY_HAND)]
    _by_hand(server, folders[0])
    took, changed, worst = [], 0, 0.0
    before: list[int] = []
    for n in range(1, UPDATES + 1):
        begun = time.perf_counter()
        client.announce("updates", Version(0, n), weights=str(folders[n]))
        wait_for(f"version {n}", partial(_serves, client, server, n), timeout_s=60, interval_s=0.005)
        took.append(time.perf_counter() - begun)
        ids, told = _probe(server)
        difference = _apart(told, forward(folders[n], PROBE + ids)[len(PROBE) - 1 :])
        changed += ids != before and difference < CLOSE
        before, worst = ids, max(worst, difference)
        if n % 10 == 0:
            print(f"{n} of {UPDATES} updates", flush=True)
    client.close_run("updates")
    server.until_idle()
    episodes = client.run("updates").episodes
    spans, straddling, apart = _check_records(client, folders, forward)
    print(f"episodes: {episodes}; checked {spans} spans, {straddling} records of several versions")
    middle, longest, hand = 1e3 * median(took), 1e3 * max(took), 1e3 * median(by_hand)
    print(f"an update took {middle:.0f} ms (the longest {longest:.0f} ms), by hand {hand:.0f} ms")
    return [
        Row("weight update, added to vLLM's own", (middle - hand) / 1e3, "s", "the goal", 1.0, 1.0, "lower"),
        Row("episodes lost in 50 updates", float(episodes.get("failed", 0)), "", "the goal (0)", 1.0, 0.0, "lower"),
        Row("updates that changed the outputs, exactly", float(changed), "", "all", float(UPDATES), 1.0, "higher"),
        Row("logprobs, probes, against PyTorch", worst, "nats", "the goal", CLOSE, 1.0, "lower"),
        Row("logprobs, stored spans, against PyTorch", apart, "nats", "the goal", CLOSE, 1.0, "lower"),
    ]


PROBE = [*b"What comes next?"]


def _folders(model: Path, folder: Path) -> list[Path]:
    """Each version's weights: those of version 0 and a step away from them, as a learner would make it, but larger."""
    first = read(model / WEIGHTS)
    made = [model]
    for n in range(1, UPDATES + 1):
        random = np.random.default_rng(n)
        noise = {name: random.normal(0.0, 0.03, tensor.shape).astype(np.float32) for name, tensor in first.items()}
        made.append(folder / f"0.{n}")
        made[-1].mkdir(parents=True)
        write(made[-1] / WEIGHTS, {name: tensor + noise[name] for name, tensor in first.items()})
        (made[-1] / "config.json").write_bytes((model / "config.json").read_bytes())
    return made


def _by_hand(server: Vllm, folder: Path) -> float:
    """vLLM's own part: the same calls in the same order, and nothing else."""
    begun = time.perf_counter()
    server.post("/pause?mode=keep&clear_cache=true")
    server.post("/collective_rpc", {"method": "headrace_load", "args": [str(folder)]})
    server.post("/resume")
    return time.perf_counter() - begun


def _serves(client: Client, server: Vllm, n: int) -> bool:
    return server.version() == f"updates@0.{n}" and b"false" in server.get("/is_paused")


def _probe(server: Vllm) -> tuple[list[int], list[float]]:
    sampling = {"max_tokens": 24, "temperature": 0, "logprobs": 0}
    answer = server.post(GENERATE, {"model": "policy", "token_ids": PROBE, "sampling_params": sampling})
    choice: Any = answer["choices"][0]
    return choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]]


def _check_records(client: Client, folders: list[Path], forward: Logprobs) -> tuple[int, int, float]:
    """Spans and records checked, and the largest difference."""
    summaries = sorted(client.trajectories("updates", status="finished"), key=lambda found: found.low == found.high)
    spans, straddling, apart = 0, 0, 0.0
    for summary in summaries[:CHECKED]:
        straddling += summary.low != summary.high
        for told, expected in _spans(client.trajectory(summary.id), folders, forward):
            spans += 1
            apart = max(apart, _apart(told, expected))
    return spans, straddling, apart


def _spans(record: Trajectory, folders: list[Path], forward: Logprobs) -> list[tuple[list[float], list[float]]]:
    found = []
    for segment in record.rows():
        start = 0
        for run in segment.versions:
            sampled = [at for at in range(max(start, 1), run.end) if segment.sampled[at]]
            if sampled:
                whole = forward(folders[run.n], segment.token_ids[: run.end].tolist())
                told = [float(segment.logprobs[at]) for at in sampled]
                found.append((told, [whole[at - 1] for at in sampled]))
            start = run.end
    return found


def _apart(told: list[float], expected: list[float]) -> float:
    return float(np.abs(np.array(told) - np.array(expected)).max())

"""A whole learner in one file: pull a batch, step along the policy gradient, load the weights, ack.

    headrace up --tiny-policy
    headrace run examples/guess_the_number.json
    python examples/learner.py --run guess --versions 40

With --checkpoint it may be killed at any point: the checkpoint names its batch and is on disk before the weights are
loaded and the batch is acked, so a batch that comes again is acked with the version it made, never trained on twice.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace import Batch, Client, Version
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, HeadraceError
from headrace_workers.tiny_policy.model import Floats, Model

LEARNING_RATE = 6.0  # large, because a turn's gradient is at most 1 and is averaged over all turns of a batch
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the policy is near: no proxy
TEXT = "version {version}: mean reward {mean_reward:.2f}, mean guesses {mean_guesses:.2f}"


class State(NamedTuple):
    """All that a restart needs."""

    weights: Floats
    version: Version
    batch: str  # the last batch in these weights; empty: none


def improve(weights: Floats, batch: Batch) -> Floats:
    """One step along the policy gradient, with the advantages that the service computed."""
    model, gradient = Model(weights), np.zeros_like(weights)
    for row in batch.rows:
        for turn, advantage in zip(row.turns, row.advantages, strict=True):
            gradient += advantage * model.gradient(row.token_ids[: turn.start], row.token_ids[turn.start : turn.end])
    return weights + LEARNING_RATE / max(1, batch.manifest.counts.turns) * gradient


def train(
    client: Client, run: str, policy: str, versions: int, checkpoint: Path | None = None, control: bool = False
) -> Iterator[dict[str, Any]]:
    """Pull and step until the service knows so many versions of the run; gives each step as it is acked."""
    state = _read(checkpoint) if checkpoint and checkpoint.exists() else fetch(policy)
    load(policy, state)
    while Version.parse(client.run(run).version).n < versions:
        batch = client.pull(run)
        if batch.id != state.batch:  # else it was trained on before, and only the ack is missing
            client.doing(run, "training")
            weights = state.weights if control else improve(state.weights, batch)
            state = State(weights, Version(batch.version.lineage, state.version.n + 1), batch.id)
            if checkpoint:
                _write(checkpoint, state)
        while client.hold(run, wait_s=10.0).hold_s > 0:  # evaluations still need the old weights
            client.doing(run, "waiting")
        load(policy, state)
        try:
            client.ack(batch, version=state.version)
        except (BatchSuperseded, BatchAlreadyAcked):
            continue  # the lease ran out, or an ack before a restart got through: the next pull says which
        counts, reward = batch.manifest.counts, batch.manifest.moments.rewards.mean
        yield {"version": str(state.version), "mean_reward": reward, "mean_guesses": counts.turns / counts.trajectories}


def fetch(policy: str) -> State:
    with _open(f"{policy}/weights", timeout=60) as reply:
        return State(np.frombuffer(reply.read(), "<f8"), Version.parse(reply.headers["X-Weight-Version"]), "")


def load(policy: str, state: State) -> None:
    body, headers = state.weights.astype("<f8").tobytes(), {"X-Weight-Version": str(state.version)}
    _open(urllib.request.Request(f"{policy}/weights", body, headers), timeout=60).close()


def _read(checkpoint: Path) -> State:
    with np.load(checkpoint) as saved:
        return State(saved["weights"], Version.parse(str(saved["version"])), str(saved["batch"]))


def _write(checkpoint: Path, state: State) -> None:
    beside = checkpoint.with_suffix(".new")
    with beside.open("wb") as file:
        np.savez(file, weights=state.weights, version=str(state.version), batch=state.batch)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny policy on one run.")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or this machine)")
    parser.add_argument("--policy", default="http://127.0.0.1:8471", help="address of the tiny policy")
    parser.add_argument("--run", default="guess", help="name of the run")
    parser.add_argument("--versions", type=int, default=40, help="versions to make in all")
    parser.add_argument("--checkpoint", type=Path, help="file that makes a restart go on (default: none)")
    parser.add_argument("--zero-advantages", action="store_true", help="change nothing: the control")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version")
    ask = parser.parse_args()
    try:
        with Client(ask.url, learner=f"learner-{ask.run}") as client:
            for step in train(client, ask.run, ask.policy, ask.versions, ask.checkpoint, ask.zero_advantages):
                print(json.dumps(step) if ask.json else TEXT.format(**step), flush=True)
    except HeadraceError as error:
        raise SystemExit(str(error)) from error
    except (urllib.error.URLError, ConnectionError) as error:
        raise SystemExit(f"The policy at {ask.policy} does not answer: {error}") from error


if __name__ == "__main__":
    main()

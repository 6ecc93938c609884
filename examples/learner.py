"""A complete learner in one file: pull a batch, step along the policy gradient, load the weights, ack.

    headrace up --tiny-policy
    headrace run examples/guess_the_number.json
    python examples/learner.py --run guess --versions 40

With --checkpoint it may be killed at any point. The checkpoint names its batch and is on disk before the weights are
loaded and the batch is acked, so a batch that is delivered again is acked with its version and not trained on twice.
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
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # without the proxy of the environment
TEXT = "version {version}: mean reward {mean_reward:.2f}, mean guesses {mean_guesses:.2f}"


class State(NamedTuple):
    """State of the learner: everything that a restart needs."""

    weights: Floats
    version: Version
    batch: str  # id of the last batch in these weights, if any


def improve(weights: Floats, batch: Batch) -> Floats:
    """Take one step along the policy gradient, with the advantages that the service computed."""
    model, gradient = Model(weights), np.zeros_like(weights)
    for row in batch.rows:
        for turn, advantage in zip(row.turns, row.advantages, strict=True):
            gradient += advantage * model.gradient(row.token_ids[: turn.start], row.token_ids[turn.start : turn.end])
    return weights + LEARNING_RATE / max(1, batch.manifest.counts.turns) * gradient


def train(
    client: Client, run: str, policy: str, versions: int, checkpoint: Path | None = None, control: bool = False
) -> Iterator[dict[str, Any]]:
    """Train until the run has ``versions`` versions; yield the figures of each step once it is acked."""
    state = _read(checkpoint) if checkpoint and checkpoint.exists() else fetch(policy)
    load(policy, state)
    while Version.parse(client.run(run).version).n < versions:
        batch = client.pull(run)
        if batch.id != state.batch:  # otherwise only the ack was missing
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
            continue  # the lease expired, or an ack before a restart succeeded: the next pull tells which
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
    partial = checkpoint.with_suffix(".new")
    with partial.open("wb") as file:
        np.savez(file, weights=state.weights, version=str(state.version), batch=state.batch)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny policy on one run.")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or a local one)")
    parser.add_argument("--policy", default="http://127.0.0.1:8471", help="address of the tiny policy")
    parser.add_argument("--run", default="guess", help="name of the run")
    parser.add_argument("--versions", type=int, default=40, help="total number of versions to make")
    parser.add_argument("--checkpoint", type=Path, help="file from which a restart continues (default: none)")
    parser.add_argument("--zero-advantages", action="store_true", help="keep the weights, as a control")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version")
    args = parser.parse_args()
    try:
        with Client(args.url, learner=f"learner-{args.run}") as client:
            for step in train(client, args.run, args.policy, args.versions, args.checkpoint, args.zero_advantages):
                print(json.dumps(step) if args.json else TEXT.format(**step), flush=True)
    except HeadraceError as error:
        raise SystemExit(str(error)) from error
    except (urllib.error.URLError, ConnectionError) as error:
        raise SystemExit(f"The policy at {args.policy} does not answer: {error}") from error


if __name__ == "__main__":
    main()

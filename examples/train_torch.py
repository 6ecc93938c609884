"""A learner in PyTorch for a policy that vLLM serves: pull, REINFORCE, checkpoint, ack with the weights.

    make train-demo        # starts everything it needs on this machine, and makes a plot at the end
    python examples/train_torch.py --run kinds --model build/tiny --checkpoints build/checkpoints

* The advantages are those of the batch, one per turn. The loss is a sum over sampled tokens, divided by their number.
* A batch is older than the weights that it trains. Each token's gradient is weighted by the ratio of the token's
  current probability to its probability in the engine that sampled it, truncated at a cap.
* A checkpoint is a folder named by its version, written atomically. It has the weights, which the service loads from
  there into the run's policy servers, and the state of the optimizer.
* The learner may be killed at any point. A restarted one continues from the newest checkpoint; a batch that is already
  in it is acked and not trained on twice.

The learner may run on another machine than the rest of Headrace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from headrace import Batch, Client, Version
from headrace.batch.batch import Row
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, HeadraceError
from headrace.layouts import padded

CAP = 2.0  # limit of the importance ratio
KEEP = 3  # checkpoints: the newest, and those that policy servers may still be loading
TEXT = "version {version}: reward {reward:.2f}, entropy {entropy:.2f}, staleness {staleness:.2f}, ratio {ratio:.3f}"


class Loss(NamedTuple):
    """Loss of a batch. ``ratio``, ``entropy`` (in nats) and ``capped`` (a share) are means over sampled tokens."""

    total: torch.Tensor
    ratio: float
    capped: float
    entropy: float


def policy_loss(model: Any, rows: Sequence[Row], sampled_tokens: int, cap: float = CAP, bonus: float = 0.0) -> Loss:
    """Compute the loss of REINFORCE with truncated importance sampling, minus ``bonus`` times the entropy. Correct for
    temperature 1, at which the engine's logprobs are those of the sampling distribution."""
    layout = padded(rows, side="right", shift=True)  # shifted to the positions at which the model predicts the tokens
    token_ids, mask = torch.from_numpy(layout.token_ids).long(), torch.from_numpy(layout.mask).bool()
    engine, advantages = torch.from_numpy(layout.logprobs)[mask], torch.from_numpy(layout.advantages)[mask]
    scores = model(input_ids=token_ids).logits[mask].log_softmax(-1)  # attention is causal: padding has no effect
    now = scores.gather(-1, token_ids.roll(-1, dims=1)[mask].unsqueeze(-1)).squeeze(-1)
    ratio = (now.detach() - engine).exp()
    entropy = -(scores.exp() * scores).sum(-1)
    total = -(ratio.clamp(max=cap) * advantages * now + bonus * entropy).sum() / sampled_tokens
    return Loss(total, ratio.mean().item(), (ratio > cap).float().mean().item(), entropy.mean().item())


class Learner:
    """Model and optimizer at a version. ``batch`` is the id of the last batch in these weights, if any; ``figures``
    describe its step."""

    def __init__(self, model: Path, checkpoints: Path, *, versions: int, rate: float, bonus: float) -> None:
        """Load the newest checkpoint, or else the model as version 0.0. The learning rate falls from ``rate`` to a
        tenth of it over ``versions`` versions."""
        self.checkpoints, self.versions, self.rate, self.bonus = checkpoints, versions, rate, bonus
        self.version, self.batch, self.figures = max(_versions(checkpoints), default=Version(0, 0)), "", {}
        self.folder = checkpoints / str(self.version) if self.version.n else model
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        if self.version.n:
            saved = torch.load(self.folder / "learner.pt", weights_only=True)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.batch, self.figures = saved["batch"], saved["figures"]

    def step(self, batch: Batch) -> None:
        """Train on a batch and save the version that it makes."""
        loss = policy_loss(self.model, batch.rows, batch.manifest.counts.sampled_tokens, bonus=self.bonus)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(0.1, 1 - self.version.n / self.versions)
        self.optimizer.zero_grad()
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).item()
        self.optimizer.step()
        ages = versions_behind(batch.rows, self.version)
        self.version, self.batch = Version(batch.version.lineage, self.version.n + 1), batch.id
        self.folder = self.checkpoints / str(self.version)
        counts, moments = batch.manifest.counts, batch.manifest.moments
        self.figures = {"reward": moments.rewards.mean, "turns": counts.turns / counts.trajectories}
        self.figures |= {"entropy": loss.entropy, "ratio": loss.ratio, "capped": loss.capped, "gradient": norm}
        self.figures |= {"staleness": ages.mean().item(), "oldest": ages.max().item()}
        self.save()

    def save(self) -> None:
        """Write the checkpoint atomically, and remove old ones."""
        partial = self.checkpoints / f".{self.version}.new"
        shutil.rmtree(partial, ignore_errors=True)
        self.model.save_pretrained(partial)
        state = {"optimizer": self.optimizer.state_dict(), "batch": self.batch, "figures": self.figures}
        torch.save(state, partial / "learner.pt")
        for file in (*partial.iterdir(), partial):
            _to_disk(file)
        partial.rename(self.folder)
        _to_disk(self.checkpoints)
        for old in sorted(_versions(self.checkpoints))[:-KEEP]:
            shutil.rmtree(self.checkpoints / str(old))


def versions_behind(rows: Sequence[Row], version: Version) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many versions ago each sampled token was sampled, int[sampled tokens]."""
    ages = [np.zeros(0, np.int64)]
    for row in rows:
        ends = np.array([run.end for run in row.versions])
        behind = np.array([version.n - run.n for run in row.versions])
        ages.append(np.repeat(behind, np.diff(ends, prepend=0))[row.sampled.astype(bool)])
    return np.concatenate(ages)


def train(client: Client, run: str, learner: Learner, versions: int) -> Iterator[dict[str, Any]]:
    """Train until the run has ``versions`` versions; yield the figures of each once it is acked."""
    with closing(_batches(client, run)) as batches:
        while Version.parse(client.run(run).version).n < versions:
            started_at = time.monotonic()
            batch = next(batches)
            pulled_at = time.monotonic()
            if batch.id != learner.batch:  # otherwise only the ack was missing after a restart
                client.doing(run, "training")
                learner.step(batch)
            try:
                client.ack(batch, version=learner.version, weights=learner.folder)
            except (BatchSuperseded, BatchAlreadyAcked):
                continue  # the lease expired, or an ack before a restart succeeded: the next batch tells which
            seconds = {"waited_s": pulled_at - started_at, "trained_s": time.monotonic() - pulled_at}
            yield {"version": str(learner.version), "batch": batch.id, **learner.figures, **seconds}


def _batches(client: Client, run: str) -> Iterator[Batch]:
    """Yield the batches that an earlier process of this learner left, then new ones with prefetch."""
    yield from client.resume(run).batches
    yield from client.batches(run, prefetch=1)


def _versions(checkpoints: Path) -> list[Version]:
    return [Version.parse(folder.name) for folder in checkpoints.iterdir() if not folder.name.startswith(".")]


def _to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that vLLM serves on one run.")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or a local one)")
    parser.add_argument("--run", default="kinds", help="name of the run")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model at version 0.0")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the checkpoints; made if missing")
    parser.add_argument("--versions", type=int, default=120, help="versions to make; the learning rate falls over them")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the first version")
    parser.add_argument("--bonus", type=float, default=0.0, help="weight of the entropy in the loss")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the policy server needs the other cores
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    learner = Learner(
        options.model, options.checkpoints, versions=options.versions, rate=options.rate, bonus=options.bonus
    )
    try:
        with Client(options.url, learner=f"learner-{options.run}") as client:
            for step in train(client, options.run, learner, options.versions):
                print(json.dumps(step) if options.json else TEXT.format(**step), flush=True)
    except HeadraceError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

"""A learner in PyTorch for a policy that vLLM serves: pull, REINFORCE, checkpoint, ack with the weights.

    make train-demo        # everything that it needs, on this machine, with a plot at the end
    python examples/train_torch.py --run kinds --model build/tiny --checkpoints build/checkpoints

* Advantages are the batch's own, one for each turn. The loss is a sum over sampled tokens, divided by their number.
* A batch is older than the weights that it trains. Each token's gradient is weighted by how likely the token is now
  against how likely it was to the engine that sampled it, and that ratio is truncated at a cap.
* A checkpoint is a folder that is named for its version and appears whole: the weights, which the service loads into
  the run's policy servers from there, and what the optimizer knows.
* It may be killed at any point. Started again it goes on from the newest checkpoint, and a batch that is in there
  already is acked and not trained on twice.

It runs where torch is, which need not be where anything else of Headrace runs.
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

CAP = 2.0  # of the ratio: a token that has become likelier than this counts no more than this
KEEP = 3  # checkpoints: the newest, and those that policy servers may still be loading
TEXT = "version {version}: reward {reward:.2f}, entropy {entropy:.2f}, staleness {staleness:.2f}, ratio {ratio:.3f}"


class Loss(NamedTuple):
    """``ratio``, ``capped`` and ``entropy`` (in nats) are means over sampled tokens; ``capped`` is a share."""

    total: torch.Tensor
    ratio: float
    capped: float
    entropy: float


def policy_loss(model: Any, rows: Sequence[Row], sampled_tokens: int, cap: float = CAP, bonus: float = 0.0) -> Loss:
    """REINFORCE with truncated importance sampling, and ``bonus`` times the entropy. Right for temperature 1, where the
    engine's logprobs are those of what was sampled."""
    layout = padded(rows, side="right", shift=True)  # shifted: everything stands where the model predicts the token
    token_ids, mask = torch.from_numpy(layout.token_ids).long(), torch.from_numpy(layout.mask).bool()
    engine, advantages = torch.from_numpy(layout.logprobs)[mask], torch.from_numpy(layout.advantages)[mask]
    scores = model(input_ids=token_ids).logits[mask].log_softmax(-1)  # attention looks back, so padding is not seen
    now = scores.gather(-1, token_ids.roll(-1, dims=1)[mask].unsqueeze(-1)).squeeze(-1)
    ratio = (now.detach() - engine).exp()
    entropy = -(scores.exp() * scores).sum(-1)
    total = -(ratio.clamp(max=cap) * advantages * now + bonus * entropy).sum() / sampled_tokens
    return Loss(total, ratio.mean().item(), (ratio > cap).float().mean().item(), entropy.mean().item())


class Learner:
    """Model and optimizer at a version. ``batch``: the last one in these weights, if any; ``figures`` tell of it."""

    def __init__(self, model: Path, checkpoints: Path, *, versions: int, rate: float, bonus: float) -> None:
        """The newest checkpoint, or else the model as version 0.0. The learning rate falls to a tenth of ``rate`` over
        so many ``versions``."""
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
        found = policy_loss(self.model, batch.rows, batch.manifest.counts.sampled_tokens, bonus=self.bonus)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(0.1, 1 - self.version.n / self.versions)
        self.optimizer.zero_grad()
        found.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).item()
        self.optimizer.step()
        ages = versions_behind(batch.rows, self.version)
        self.version, self.batch = Version(batch.version.lineage, self.version.n + 1), batch.id
        self.folder = self.checkpoints / str(self.version)
        counts, moments = batch.manifest.counts, batch.manifest.moments
        self.figures = {"reward": moments.rewards.mean, "turns": counts.turns / counts.trajectories}
        self.figures |= {"entropy": found.entropy, "ratio": found.ratio, "capped": found.capped, "gradient": norm}
        self.figures |= {"staleness": ages.mean().item(), "oldest": ages.max().item()}
        self.save()

    def save(self) -> None:
        """Write the checkpoint beside its place, then put it there; remove those that nobody needs any more."""
        beside = self.checkpoints / f".{self.version}.new"
        shutil.rmtree(beside, ignore_errors=True)
        self.model.save_pretrained(beside)
        state = {"optimizer": self.optimizer.state_dict(), "batch": self.batch, "figures": self.figures}
        torch.save(state, beside / "learner.pt")
        for file in (*beside.iterdir(), beside):
            _to_disk(file)
        beside.rename(self.folder)
        _to_disk(self.checkpoints)
        for old in sorted(_versions(self.checkpoints))[:-KEEP]:
            shutil.rmtree(self.checkpoints / str(old))


def versions_behind(rows: Sequence[Row], version: Version) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many versions ago each sampled token was sampled, int[sampled tokens]."""
    found = [np.zeros(0, np.int64)]
    for row in rows:
        ends = np.array([run.end for run in row.versions])
        behind = np.array([version.n - run.n for run in row.versions])
        found.append(np.repeat(behind, np.diff(ends, prepend=0))[row.sampled.astype(bool)])
    return np.concatenate(found)


def train(client: Client, run: str, learner: Learner, versions: int) -> Iterator[dict[str, Any]]:
    """Pull and step until the service knows so many versions; gives the figures of each once it is acked."""
    with closing(_batches(client, run)) as batches:
        while Version.parse(client.run(run).version).n < versions:
            began = time.monotonic()
            batch = next(batches)
            pulled = time.monotonic()
            if batch.id != learner.batch:  # else it was trained on before a restart, and only the ack is missing
                client.doing(run, "training")
                learner.step(batch)
            try:
                client.ack(batch, version=learner.version, weights=learner.folder)
            except (BatchSuperseded, BatchAlreadyAcked):
                continue  # the lease ran out, or an ack before a restart got through: the next one says which
            seconds = {"waited_s": pulled - began, "trained_s": time.monotonic() - pulled}
            yield {"version": str(learner.version), "batch": batch.id, **learner.figures, **seconds}


def _batches(client: Client, run: str) -> Iterator[Batch]:
    """What an earlier process of this learner left, then new ones, the next always fetched while one is trained on."""
    yield from client.resume(run).batches
    yield from client.batches(run, prefetch=1)


def _versions(checkpoints: Path) -> list[Version]:
    return [Version.parse(found.name) for found in checkpoints.iterdir() if not found.name.startswith(".")]


def _to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that vLLM serves on one run.")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or this machine)")
    parser.add_argument("--run", default="kinds", help="name of the run")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model at version 0.0")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the checkpoints; made if missing")
    parser.add_argument("--versions", type=int, default=120, help="versions to make; the learning rate falls over them")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at the first of them")
    parser.add_argument("--bonus", type=float, default=0.0, help="weight of the entropy in the loss")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version")
    ask = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the other core is the policy's
    ask.checkpoints.mkdir(parents=True, exist_ok=True)
    learner = Learner(ask.model, ask.checkpoints, versions=ask.versions, rate=ask.rate, bonus=ask.bonus)
    try:
        with Client(ask.url, learner=f"learner-{ask.run}") as client:
            for step in train(client, ask.run, learner, ask.versions):
                print(json.dumps(step) if ask.json else TEXT.format(**step), flush=True)
    except HeadraceError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

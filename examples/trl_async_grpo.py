"""TRL's asynchronous GRPO trainer as the learner of a run: it pulls its rows, and its weights go to the servers.

    pip install headrace trl==1.16.0
    headrace up
    python examples/trl_async_grpo.py MODEL --server http://gpu-1:8000 --server http://gpu-2:8000

MODEL is a folder with weights and tokenizer; the servers are vLLM's, started for it as docs/policy.md says. They read
each step's weights from --weights, by the same path. Without --server, workers ask the policy that they were started
with, and the weights stay in the folder.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import headrace
from headrace.integrations.trl import HeadraceRollouts, HeadraceWeights

EPISODES = 64
"""Of a batch. GRPO gives an episode one advantage, so each is one sample, and a step of the trainer takes a batch."""

CONFIG: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": EPISODES // 8,
    "token_budget": 0,  # micro-batches of so many samples, not of so many tokens
    "temperature": 1.0,  # as the run's
    "report_to": [],
    "save_strategy": "no",
}


def train(client: headrace.Client, run: str, model: str, folder: str, **config: Any) -> AsyncGRPOTrainer:
    """Train the model of a folder on a run; ``config`` is for AsyncGRPOConfig."""
    weights = HeadraceWeights(model, folder)
    trainer = AsyncGRPOTrainer(
        model,
        args=AsyncGRPOConfig("trl-output", **{**CONFIG, **config}),
        train_dataset=Dataset.from_dict({"prompt": ["unused: the run has tasks of its own"]}),
        rollout_worker=HeadraceRollouts(client, run, weights=weights),
        weight_transfer=weights,
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with TRL on a run of Headrace.")
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or this machine)")
    parser.add_argument("--run", default="trl", help="name of the run")
    parser.add_argument("--environment", default="math:Arithmetic-v0", help="id of the environment")
    parser.add_argument("--server", action="append", default=[], help="address of a vLLM server; may be repeated")
    parser.add_argument("--weights", default="weights", help="folder for the weights of each step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    ask = parser.parse_args()
    spec = {
        "name": ask.run,
        "environments": [{"id": ask.environment}],
        "group_size": 8,
        "batch_size": EPISODES,
        "max_staleness": 2,
        "estimator": {"name": "grpo"},
        "policy": {"endpoints": ask.server, "renderer": "auto", "tokenizer": ask.model},
    }
    with headrace.Client(ask.url, learner=f"trl-{ask.run}") as client:
        client.create_run(spec, exist_ok=True)
        train(client, ask.run, ask.model, ask.weights, max_steps=ask.steps)


if __name__ == "__main__":
    main()

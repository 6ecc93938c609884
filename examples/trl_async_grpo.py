"""TRL's asynchronous GRPO trainer as the learner of a run: it pulls rows, and sends its weights to the policy servers.

    pip install headrace trl==1.16.0
    headrace up
    python examples/trl_async_grpo.py MODEL --server http://gpu-1:8000 --server http://gpu-2:8000

MODEL is a folder with weights and tokenizer. The servers are vLLM servers of that model, started as docs/policy.md
describes; they must be able to read each step's weights from the path given by --weights. Without --server, workers use
the policy that they were started with, and the weights stay in the folder.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import headrace
from headrace.integrations.trl import HeadraceRollouts, HeadraceWeights

EPISODES = 64
"""Episodes of a batch. With GRPO an episode has one advantage, so it is one sample; each trainer step uses a batch."""

CONFIG: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": EPISODES // 8,
    "token_budget": 0,  # limit micro-batches by samples, not by tokens
    "temperature": 1.0,  # the run's temperature
    "report_to": [],
    "save_strategy": "no",
}


def train(client: headrace.Client, run: str, model: str, folder: str, **config: Any) -> AsyncGRPOTrainer:
    """Train the model in the folder ``model`` on a run; ``config`` goes to AsyncGRPOConfig."""
    weights = HeadraceWeights(model, folder)
    trainer = AsyncGRPOTrainer(
        model,
        args=AsyncGRPOConfig("trl-output", **{**CONFIG, **config}),
        train_dataset=Dataset.from_dict({"prompt": ["unused: the run has its own tasks"]}),
        rollout_worker=HeadraceRollouts(client, run, weights=weights),
        weight_transfer=weights,
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with TRL on a run of Headrace.")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--url", help="address of the orchestrator (default: HEADRACE_URL, or a local one)")
    parser.add_argument("--run", default="trl", help="name of the run")
    parser.add_argument("--environment", default="math:Arithmetic-v0", help="id of the environment")
    parser.add_argument("--server", action="append", default=[], help="address of a vLLM server; may be repeated")
    parser.add_argument("--weights", default="weights", help="folder for the weights of each step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    options = parser.parse_args()
    spec = {
        "name": options.run,
        "environments": [{"id": options.environment}],
        "group_size": 8,
        "batch_size": EPISODES,
        "max_staleness": 2,
        "estimator": {"name": "grpo"},
        "policy": {"endpoints": options.server, "renderer": "auto", "tokenizer": options.model},
    }
    with headrace.Client(options.url, learner=f"trl-{options.run}") as client:
        client.create_run(spec, exist_ok=True)
        train(client, options.run, options.model, options.weights, max_steps=options.steps)


if __name__ == "__main__":
    main()

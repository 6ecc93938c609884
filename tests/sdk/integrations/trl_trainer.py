"""TRL's trainers as learners, in the environment with torch: ``echo '{"url": …}' | python trl_trainer.py``.

It trains on two runs and writes a report. Everything is imported while it waits for its task. Two parts of TRL need a
GPU and are replaced: the kernel for attention over a tree of prefixes, by plain PyTorch, and the query of the GPU's
speed. vLLM is not imported, because that takes ten seconds, and only TRL's own transfer of weights needs it.
"""

# ruff: noqa: E402 - TRL looks for vLLM while it is imported, so that this has to be replaced first

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from trl import import_utils

import_utils.is_vllm_available = lambda **_: False

import torch
import trl.experimental.async_grpo.async_grpo_trainer as async_grpo_trainer
import trl.experimental.async_grpo.packing as packing
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import headrace
from examples.trl_async_grpo import train
from headrace.integrations.trl_grpo import WeightFolder, headrace_reward, rollout_func
from headrace.integrations.trl_samples import samples

ON_CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-3,
}


FIELDS = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
"""Fields of a sample that TRL's queue passes to its planner."""


def varlen_attention(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any
) -> Any:
    """``flash_attn_varlen_func`` for causal attention without a window: [tokens, heads, width], sequence by sequence.
    A query attends to the keys up to its own position, counted from the end."""
    out = torch.empty_like(query)
    for begin, end, first, last in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        q, k, v = (x.transpose(0, 1) for x in (query[begin:end], key[first:last], value[first:last]))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        attended = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=softmax_scale, enable_gqa=True)
        out[begin:end] = attended.transpose(0, 1)
    return out


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def asynchronous(client: headrace.Client, ask: dict[str, Any]) -> Any:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    folder = f"{ask['folder']}/async"
    return train(client, "async", ask["model"], folder, max_steps=ask["steps"], **sizes, **ON_CPU)


def synchronous(client: headrace.Client, ask: dict[str, Any]) -> Any:
    def task(prompt: str) -> dict[str, Any]:
        return {"environment": "test:Parity", "seed": 1, "example": {"prompt": prompt}}

    weights = WeightFolder(ask["model"], f"{ask['folder']}/grpo")
    trainer = GRPOTrainer(
        ask["model"],
        reward_funcs=headrace_reward,
        args=GRPOConfig(
            f"{ask['folder']}/output",
            max_steps=2,
            num_generations=4,
            per_device_train_batch_size=8,
            beta=0.0,
            **ON_CPU,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["one", "two", "three", "four"]}),
        rollout_func=rollout_func(client, "grpo", task, weights=weights, timeout_s=60),
    )
    trainer.train()
    return trainer


def packed(path: str) -> list[dict[str, Any]]:
    """The loss terms that TRL packs for each sample of a batch in a file."""
    batch = headrace.Batch.parse(Path(path).read_bytes())
    rows = []
    for sample in samples(batch, first_version=0, first_group=0, now_s=0.0):
        row = packing.TreeRow()
        row.add({name: getattr(sample, name) for name in FIELDS})
        terms = row.pack()
        rows.append({name: terms[name].tolist() for name in ("token_index", "old_log_probs", "advantages")})
    return rows


def report(trainer: Any, model: str) -> dict[str, Any]:
    before = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    after = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    return {
        "steps": trainer.state.global_step,
        "parameters": len(after),
        "changed": sum(not torch.equal(after[name], before[name]) for name in after),
        "log": trainer.state.log_history,
    }


def main() -> None:
    ask = json.loads(sys.stdin.read())
    reports: dict[str, Any] = {"packed": {name: packed(path) for name, path in ask["batches"].items()}}
    reports["fields"] = [field.name for field in dataclasses.fields(async_grpo_trainer.RolloutSample)]
    with headrace.Client(ask["url"], learner="trl") as client:
        for run, learn in {"async": asynchronous, "grpo": synchronous}.items():
            reports[run] = report(learn(client, ask), ask["model"])
            client.close_run(run)
    Path(ask["report"]).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()

"""Logprobs by transformers' own forward. Runs in the environment with torch; one question and one answer a line.

A question is {"folder", "adapter": folder or null, "token_ids": int[n]}, its answer float[n - 1].
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

sys.stdout.write("running\n")
sys.stdout.flush()

import torch  # noqa: E402  (takes ten seconds)
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402


@lru_cache(maxsize=16)
def load(folder: str, adapter: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()


@torch.no_grad()
def logprobs(folder: str, adapter: str | None, token_ids: list[int]) -> list[float]:
    ids = torch.tensor([token_ids])
    told: list[float] = (
        load(folder, adapter)(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).flatten().tolist()
    )
    return told


if __name__ == "__main__":
    logging.disable_progress_bar()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(logprobs(**json.loads(line))) + "\n")
        sys.stdout.flush()

"""Logprobs by transformers' own forward, and the loss of torch_loss.py. Runs in the environment with torch; one
question and one answer a line.

A question with a "table" is one of torch_loss.py. Another is {"folder", "adapter": folder or null, "images": base64[],
"token_ids": int[n]}, its answer float[n - 1]. Of a model that sees images, ``images`` are those that the ids show, in
order.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from functools import lru_cache
from typing import Any

sys.stdout.write("running\n")
sys.stdout.flush()

import torch  # noqa: E402  (takes ten seconds)
from peft import PeftModel  # noqa: E402
from PIL import Image  # noqa: E402
from torch_loss import loss  # noqa: E402
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from transformers.utils import logging  # noqa: E402


@lru_cache(maxsize=16)
def load(folder: str, adapter: str | None, sees: bool) -> Any:
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()


@torch.no_grad()
def logprobs(folder: str, adapter: str | None, images: list[str], token_ids: list[int]) -> list[float]:
    ids = torch.tensor([token_ids])
    logits = load(folder, adapter, bool(images))(ids, **pixels(folder, images)).logits
    told: list[float] = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).flatten().tolist()
    return told


def pixels(folder: str, images: list[str]) -> dict[str, Any]:
    """The model's other inputs besides ids."""
    if not images:
        return {}
    opened = [Image.open(io.BytesIO(base64.b64decode(image))) for image in images]
    return {"pixel_values": AutoImageProcessor.from_pretrained(folder)(opened, return_tensors="pt")["pixel_values"]}


if __name__ == "__main__":
    logging.disable_progress_bar()
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.write(json.dumps(loss(asked) if "table" in asked else logprobs(**asked)) + "\n")
        sys.stdout.flush()

"""The loss of examples/train_torch.py and its gradient, for a model that is a table of logits by the token before. Runs
in the environment with torch; reads one question, answers in JSON.

A question is {"table": float[tokens][tokens], "rows": [{"token_ids", "sampled", "logprobs", "advantages"}, ...], "cap",
"bonus"}, each list of a row with an item for each of its tokens.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from examples.train_torch import policy_loss


def row(asked: dict[str, Any]) -> Any:
    advantages = np.array(asked["advantages"], np.float32)
    return SimpleNamespace(
        token_ids=np.array(asked["token_ids"], np.int32),
        sampled=np.array(asked["sampled"], np.uint8),
        logprobs=np.array(asked["logprobs"], np.float32),
        token_advantages=lambda: advantages,
    )


asked = json.load(sys.stdin)
table = torch.tensor(asked["table"], requires_grad=True)
rows = [row(one) for one in asked["rows"]]
sampled_tokens = sum(int(one.sampled.sum()) for one in rows)
loss = policy_loss(
    lambda input_ids: SimpleNamespace(logits=table[input_ids]),
    rows,
    sampled_tokens,
    cap=asked["cap"],
    bonus=asked["bonus"],
)
loss.total.backward()
json.dump({**loss._asdict(), "total": loss.total.item(), "gradient": table.grad.tolist()}, sys.stdout)

"""The loss of examples/train_torch.py and its gradient, for a model that is a table of logits by the token before. Runs
in the environment with torch.

A question is {"table": float[tokens][tokens], "rows": [{"token_ids", "sampled", "logprobs", "advantages"}, ...], "cap",
"bonus"}, each list of a row with an item for each of its tokens.
"""

from __future__ import annotations

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


def loss(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question."""
    table = torch.tensor(asked["table"], requires_grad=True)
    rows = [row(one) for one in asked["rows"]]
    sampled_tokens = sum(int(one.sampled.sum()) for one in rows)
    found = policy_loss(
        lambda input_ids: SimpleNamespace(logits=table[input_ids]),
        rows,
        sampled_tokens,
        cap=asked["cap"],
        bonus=asked["bonus"],
    )
    found.total.backward()
    return {**found._asdict(), "total": found.total.item(), "gradient": table.grad.tolist()}

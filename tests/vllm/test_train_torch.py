"""The loss of examples/train_torch.py against a direct computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.vllm.server import TorchLogprobs

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

TOKENS = 5


def direct(question: dict[str, Any]) -> dict[str, Any]:
    """The same by the definition, token by token, in float64, with the gradient worked out by hand."""
    table, cap, bonus = np.array(question["table"]), question["cap"], question["bonus"]
    logprobs = table - np.log(np.exp(table).sum(1, keepdims=True))
    gradient, ratios, entropies, total = np.zeros_like(table), [], [], 0.0
    for row in question["rows"]:
        for at in np.flatnonzero(row["sampled"]):
            before, token = row["token_ids"][at - 1], row["token_ids"][at]
            row_logprobs, probabilities = logprobs[before], np.exp(logprobs[before])
            entropy = -(probabilities * row_logprobs).sum()
            ratio = np.exp(row_logprobs[token] - row["logprobs"][at])
            weight = min(ratio, cap) * row["advantages"][at]
            total -= weight * row_logprobs[token] + bonus * entropy
            gradient[before] -= weight * (np.eye(TOKENS)[token] - probabilities)
            gradient[before] += bonus * probabilities * (row_logprobs + entropy)
            ratios.append(ratio)
            entropies.append(entropy)
    capped = np.mean(np.array(ratios) > cap)
    means = {"ratio": np.mean(ratios), "capped": capped, "entropy": np.mean(entropies)}
    return {"total": total / len(ratios), "gradient": (gradient / len(ratios)).tolist(), **means}


def test_the_loss_and_its_gradient_are_those_of_a_direct_computation(torch_logprobs: TorchLogprobs) -> None:
    random = np.random.default_rng(0)
    rows = []
    for length in (9, 4, 12):  # padded to one width
        sampled = (random.random(length) < 0.5).astype(int)
        sampled[0], sampled[-1] = 0, 1
        rows.append(
            {
                "token_ids": random.integers(0, TOKENS, length).tolist(),
                "sampled": sampled.tolist(),
                "logprobs": (-3 * random.random(length) * sampled).tolist(),
                "advantages": (random.normal(size=length) * sampled).tolist(),
            }
        )
    table = random.normal(size=(TOKENS, TOKENS)).tolist()
    question = {"table": table, "rows": rows, "cap": 1.5, "bonus": 0.1}
    found, expected = torch_logprobs.loss(question), direct(question)
    assert 0 < expected["capped"] < 1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

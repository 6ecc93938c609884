"""Specs of the stored runs: with every kind of source, and with small records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

POOLS = ("default", "hosted", "still")
"""Pools of real workers, each with a policy server of its own: a learner loads the first one, the service the second;
the third keeps its weights. The other pools have workers made of plain requests."""

ADAPTERS = ("opponent-1", "opponent-2")
"""Frozen adapters of the run ``nim``."""


def all_specs(addresses: dict[str, str], weights: Path) -> list[dict[str, Any]]:
    """All specs. ``addresses``: of the policy servers, by pool. ``weights``: the folder of the adapters."""
    return [
        guess(),
        nim(addresses["hosted"], weights),
        pictures(addresses["still"]),
        chosen(),
        plain(),
        brief(),
        stale(),
        ends(),
    ]


def guess() -> dict[str, Any]:
    """A mixture that a real learner trains on."""
    return {
        "name": "guess",
        "environments": [
            {"id": "game:GuessTheNumber-v0-easy", "weight": 3, "tags": ["game"]},
            {"id": "math:Arithmetic-v0", "tags": ["sums", "short"]},
        ],
        "seed": 7,
        "group_size": 2,
        "batch_size": 4,
        "bin_tokens": 2048,
        "max_staleness": 4,
        "max_uses": 2,
        "estimator": {"gamma": 0.9},
        "sampling": {"max_tokens": 24, "stop": ["\n\n"]},
        "limits": {"max_turns": 3},
        "batch_lease_s": 3600,
    }


def nim(address: str, weights: Path) -> dict[str, Any]:
    """Two agents, one of them a frozen adapter; the service loads the weights."""
    adapters = [{"name": name, "path": str(weights / name)} for name in ADAPTERS]
    return {
        "name": "nim",
        "environments": [{"id": "game:Nim-v0", "kwargs": {"heap_count": 1, "max_heap": 3}}],
        "group_size": 2,
        "batch_size": 2,
        "max_staleness": 4,
        "estimator": {"name": "grpo"},
        "policy": {
            "endpoints": [address],
            "adapters": adapters,
            "agents": {"player_1": {"adapters": list(ADAPTERS), "routing": "round_robin", "train": False}},
        },
        "sampling": {"max_tokens": 16},
        "limits": {"max_turns": 4},
        "pool": "hosted",
        "batch_lease_s": 3600,
    }


def pictures(address: str) -> dict[str, Any]:
    """A fixed list with images, and with arrays of a reference's logprobs; it is finished."""
    return {
        "name": "pictures",
        "tasks": [
            {"environment": "compatibility:Picture", "seed": seed, "example": {"answer": seed}, "tags": ["picture"]}
            for seed in (1, 2, 3)
        ],
        "batch_size": 2,
        "estimator": {"name": "none"},
        "policy": {"scorers": {"reference": {"endpoints": [address], "model": "policy"}}},
        "sampling": {"max_tokens": 8},
        "pool": "still",
    }


def chosen() -> dict[str, Any]:
    """Groups that the learner submits, drawn by priority."""
    return {
        "name": "chosen",
        "group_size": 2,
        "batch_size": 2,
        "max_staleness": 8,
        "estimator": {"name": "rloo"},
        "selection": {"order": "prioritized", "exponent": 0.5},
        "sampling": {"max_tokens": 8},
        "limits": {"max_turns": 1},
        "retries": {"max_attempts": 2, "quarantine_after": 2},
        "pool": "still",
        "batch_lease_s": 3600,
    }


def plain() -> dict[str, Any]:
    """A run whose batch leases run out, but not its attempt leases."""
    return {
        "name": "plain",
        "environments": [{"id": "test:Echo", "kwargs": {"words": ["yes", 1, None]}}],
        "group_size": 2,
        "batch_size": 2,
        "max_staleness": 8,
        "estimator": {"name": "reinforce"},
        "zero_variance": "replace",
        "partial_after_s": 1.0,
        "pool": "plain",
        "attempt_lease_s": 3600,
        "batch_lease_s": 2.0,
    }


def brief() -> dict[str, Any]:
    """A run whose attempt leases run out."""
    return {
        "name": "brief",
        "environments": [{"id": "test:Echo"}],
        "batch_size": 1,
        "pool": "brief",
        "attempt_lease_s": 1.0,
    }


def stale() -> dict[str, Any]:
    """A run whose groups go stale, with rows that fit into no bin."""
    return {
        "name": "stale",
        "environments": [{"id": "test:Echo"}],
        "batch_size": 1,
        "bin_tokens": 32,
        "pool": "stale",
    }


def ends() -> dict[str, Any]:
    """A run whose episodes end for every possible reason."""
    return {
        "name": "ends",
        "environments": [{"id": "test:Echo"}],
        "batch_size": 1,
        "max_staleness": 31,
        "policy": {"logprobs": "processed"},
        "pool": "ends",
    }

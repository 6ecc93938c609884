"""Environments and a policy that do nothing, so that only Headrace's own cost is measured.

The worker imports this module (``headrace worker --import benchmarks.null``).
"""

from __future__ import annotations

import time
from typing import Any

import headrace
from headrace_workers.policies.base import Sample, SampleRequest, one_version
from headrace_workers.renderers.bytes_renderer import END


class Null:
    """An environment of a single turn, with the reward 1."""

    blocking = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class Paced:
    """``turns`` turns that block their thread for ``turn_s`` seconds each, like a simulator."""

    def __init__(self, turn_s: float, turns: int) -> None:
        self.turn_s, self.turns, self.turn = turn_s, turns, 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.turn_s)
        self.turn += 1
        return "?", 0.0, self.turn >= self.turns, False, {}


class Talk:
    """A conversation of ``turns`` turns, independent of the actions."""

    blocking = False

    def __init__(self, turns: int) -> None:
        self.turns, self.turn = turns, 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"Say something about number {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "Go on.", float(len(action)), self.turn >= self.turns, False, {}


class NullPolicy:
    """Ends every turn at once, with probability one."""

    def sample(self, request: SampleRequest) -> Sample:
        return Sample(
            token_ids=[END], logprobs=[0.0], finish_reason="stop", versions=one_version(1, headrace.Version(0, 0))
        )


def policy() -> NullPolicy:
    """Make the policy of ``--policy benchmarks.null:policy``."""
    return NullPolicy()


headrace.register("bench:Null", Null)
headrace.register("bench:Paced", Paced)
headrace.register("bench:Talk", Talk)

"""An environment that runs in a process of its own; that process imports this module."""

from __future__ import annotations

import os
from typing import Any

import headrace
from headrace.environment import Step
from headrace.errors import SimulatorFailure


class Heavy:
    """Does what the action says; ``info`` names its process."""

    own_process = True
    version = "3"

    def __init__(self, exponent: int = 1, worth: float | None = None) -> None:
        self.exponent, self.worth = exponent, worth

    def reset(self, seed: int | None = None) -> Any:
        return f"seed {seed}", {"pid": os.getpid()}

    async def step(self, action: str) -> Step:
        match action:
            case "compute":
                self.value = 7**self.exponent  # one bytecode
            case "abort":
                os.abort()
            case "raise":
                raise ValueError("no")
            case "fail":
                raise SimulatorFailure("not now", kind="away", retryable=True)
            case "wait":
                return Step("", 0.0, False, False, {})
            case "strange":
                return Step("", lambda: 1, True, False, {})  # type: ignore[arg-type]
        return Step("", 1.0, True, False, {"pid": os.getpid()})

    async def grade(self) -> float | None:
        return self.worth


class HeavyForTwo(Heavy):
    agents = ("a", "b")

    def next_agent(self) -> str:
        return "a"


headrace.register("test:Heavy", Heavy)
headrace.register("test:HeavyForTwo", HeavyForTwo)

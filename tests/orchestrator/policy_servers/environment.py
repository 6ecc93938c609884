"""The environment ``policies:Slow``: turns of a fixed length, or a first turn that never ends."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from headrace.environment import Step, register


class Slow:
    """An episode of ``turns`` turns of ``step_s`` seconds. With ``stalls`` the first turn never ends."""

    blocking: ClassVar[bool] = False

    def __init__(self, turns: int = 2, step_s: float = 0.1, stalls: bool = False) -> None:
        self._turns_left = turns
        self._step_s = step_s
        self._stalls = stalls

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"Say something about {seed}.", {}

    async def step(self, action: str) -> Step:
        await asyncio.sleep(3600 if self._stalls else self._step_s)
        self._turns_left -= 1
        return Step("Go on.", float(len(action) % 7), self._turns_left == 0, False, {})


register("policies:Slow", Slow)

"""Environments of the stored runs: ``compatibility:Picture`` shows an image, ``compatibility:Broken`` fails."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from headrace import Image
from headrace.environment import Step, register
from headrace.errors import EnvironmentFailure
from headrace.trajectory import ContentPart


class Picture:
    """Shows a picture that depends on its seed; any action ends the episode."""

    blocking: ClassVar[bool] = False

    def __init__(self, example: dict[str, int] | None = None) -> None:
        self._example = example

    def reset(self, seed: int | None = None) -> tuple[list[ContentPart | Image], dict[str, Any]]:
        pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
        return [ContentPart(type="text", text="What is it?"), Image(data=pixels, text="<picture>")], {
            "example": self._example
        }

    def step(self, action: str) -> Step:
        return Step("", float(len(action) % 7), True, False, {"reward_parts": {"length": float(len(action) % 7)}})


class Broken:
    """Fails at every reset with a retryable failure."""

    blocking: ClassVar[bool] = False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        raise EnvironmentFailure("The machine behind it does not answer.", kind="no-machine", retryable=True)

    def step(self, action: str) -> Step:
        raise NotImplementedError


register("compatibility:Picture", Picture)
register("compatibility:Broken", Broken)

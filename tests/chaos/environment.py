"""``chaos:Picture``: one turn about one of 400 pictures, so that records of several episodes share an asset."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from headrace import Image
from headrace.environment import Step, register
from headrace.trajectory import ContentPart

PICTURES = 400


class Picture:
    """Shows the picture of its seed; any action ends the episode, with a reward that depends on its length."""

    blocking: ClassVar[bool] = False

    def reset(self, seed: int | None = None) -> tuple[list[ContentPart | Image], dict[str, Any]]:
        pixels = np.random.default_rng((seed or 0) % PICTURES).integers(0, 256, (24, 24, 3), np.uint8)
        return [ContentPart(type="text", text="What is it?"), Image(data=pixels, text="<picture>")], {}

    def step(self, action: str) -> Step:
        return Step("", float(len(action) % 7), True, False, {})


register("chaos:Picture", Picture)

"""Types of numeric command-line options: finite, and in a range."""

from __future__ import annotations

import math
from typing import Any

import click

from headrace.bounds import MAX_SECONDS


class SecondsRange(click.FloatRange):
    """A finite number of seconds."""

    def __init__(self, low: float, high: float = MAX_SECONDS) -> None:
        super().__init__(low, high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number

"""Weights of groups in a draw: whole numbers, so that their sums are exact whatever was added and removed before."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.runspec import SelectionSpec
from headrace_orchestrator.scheduler.state.groups import Group

MIN_PRIORITY = 1e-6
MAX_PRIORITY = 1e6
"""Priorities lie between these, so that no weight is lost beside the others."""

_EVEN = 1
_BITS = 133
"""A float of 1e-24, the lowest weight, is a whole number of 2⁻¹³³."""


def even(group: Group) -> int:
    """The same weight for all."""
    return _EVEN


def weigher(selection: SelectionSpec) -> Callable[[Group], int]:
    """Gives the weight of a group: its priority to the power of the run's exponent; the same for all where the order
    knows no priorities."""
    exponent = selection.exponent
    if selection.order != "prioritized":
        return even
    return lambda group: int(math.ldexp(group.priority**exponent, _BITS))

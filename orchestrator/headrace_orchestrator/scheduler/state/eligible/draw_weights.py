"""Weights of groups in a draw: whole numbers, so that sums stay exact after any additions and removals."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.runspec import SelectionSpec
from headrace.selection import SELECTION_RULES
from headrace_orchestrator.scheduler.state.groups import Group

MIN_PRIORITY = 1e-6
MAX_PRIORITY = 1e6
"""Bounds of priorities, so that no weight is lost beside the others."""

_EQUAL = 1
_BITS = 133
"""Binary places of a weight: a float of 1e-24, the lowest weight, is a whole number of 2⁻¹³³."""


def equal_weight(group: Group) -> int:
    """The same weight for every group."""
    return _EQUAL


def weight_function(selection: SelectionSpec) -> Callable[[Group], int]:
    """The function that computes a group's weight from its priority by the run's rule; the same weight for all where
    the rule uses no priorities."""
    weight, exponent = SELECTION_RULES.find(selection.order).weight, selection.exponent
    if weight is None:
        return equal_weight
    return lambda group: max(1, int(math.ldexp(weight(group.priority, exponent), _BITS)))

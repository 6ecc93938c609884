"""Weights of groups in a draw: whole numbers, so that sums stay exact after any additions and removals.

* A weight of a rule of another package that cannot be used raises SelectionRuleFailed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.errors import SelectionRuleFailed
from headrace.runspec import SelectionSpec
from headrace.selection import BUILT_IN, own_weight, stored_rule
from headrace_orchestrator.scheduler.state.groups import Group

MIN_PRIORITY = 1e-6
MAX_PRIORITY = 1e6
"""Bounds of priorities, so that no weight is lost beside the others."""

LOWEST = 1
"""The lowest weight."""

_BITS = 133
"""Binary places of a weight: a float of 1e-24, the lowest weight, is a whole number of 2⁻¹³³."""


def equal_weight(group: Group) -> int:
    """The same weight for every group."""
    return LOWEST


def weight_function(selection: SelectionSpec) -> Callable[[Group], int]:
    """The function that computes a group's weight from its priority by the run's rule; the same weight for all where
    the rule uses no priorities, or its package is gone, so that nothing can be chosen."""
    name, exponent = selection.order, selection.exponent
    try:
        weight = stored_rule(name).weight
    except SelectionRuleFailed:
        return equal_weight
    if weight is None:
        return equal_weight
    if name in BUILT_IN:
        return lambda group: _whole(weight(group.priority, exponent))
    return lambda group: _whole(own_weight(name, weight, group.priority, exponent))


def _whole(weight: float) -> int:
    return max(LOWEST, int(math.ldexp(weight, _BITS)))

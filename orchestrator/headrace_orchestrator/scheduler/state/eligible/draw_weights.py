"""Weights of groups in a draw: whole numbers, so that their sums are exact whatever was added and removed before."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.runspec import SelectionSpec
from headrace.selection import find_selection_rule
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
    """Gives the weight of a group: what the run's rule makes of its priority; the same for all where the rule knows no
    priorities."""
    weight, exponent = find_selection_rule(selection.order).weight, selection.exponent
    if weight is None:
        return even
    return lambda group: max(1, int(math.ldexp(weight(group.priority, exponent), _BITS)))

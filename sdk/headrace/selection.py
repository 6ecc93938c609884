"""Selection rules: the order in which a run's eligible groups go into batches. Definitions: ``docs/selection.md``.

* A rule accesses groups only by dispatch order and by weight, so that selecting a few is cheap.
* A rule has no random generator: its draws come from the run's seed, so that a replay repeats them.
* Other packages add rules by the entry point group ``headrace.selection``.
* A rule of another package that fails raises SelectionRuleFailed, which names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple, Protocol

from headrace.common.registry import Registry
from headrace.errors import InvalidRequest, SelectionRuleFailed

ENTRY_POINT_GROUP = "headrace.selection"
"""Each entry point of this group names a ``SelectionRule``; the entry point's name is the rule's."""

MAX_WEIGHT = 1e60
"""The highest weight of a rule of another package: the sum of many such weights is far below the 512 bits of a draw."""


MAX_SHOWN = 1000
MAX_VALUE = 100
"""Characters of a failure, and of a wrong value, that an error shows."""


class EligibleGroups(Protocol):
    """The eligible groups of a run that match a pull, as a rule accesses them."""

    def in_order(self, *, backwards: bool = False) -> Iterator[Any]:
        """Iterate over groups in the order of their dispatch."""

    def drawn(self) -> Iterator[Any]:
        """Draw groups by weight, without replacement."""


class SelectionRule(NamedTuple):
    """A rule for ``selection.order`` in a run spec.

    ``order`` iterates over groups in the order of the rule, each once. ``weight`` returns the weight of a group in a
    draw, above 0 and up to ``MAX_WEIGHT``, from its priority and ``selection.exponent``; None: all weights are equal,
    and priorities cannot be set.
    ``waits``: True if a batch waits for the oldest group in flight rather than let it go stale.
    """

    order: Callable[[EligibleGroups], Iterator[Any]]
    weight: Callable[[float, float], float] | None = None
    waits: bool = False


SELECTION_RULES = Registry(
    "selection rule",
    ENTRY_POINT_GROUP,
    SelectionRule,
    {
        "fifo": SelectionRule(lambda groups: groups.in_order(), waits=True),
        "ready": SelectionRule(lambda groups: groups.in_order()),
        "lifo": SelectionRule(lambda groups: groups.in_order(backwards=True)),
        "uniform": SelectionRule(lambda groups: groups.drawn()),
        "prioritized": SelectionRule(lambda groups: groups.drawn(), lambda priority, exponent: priority**exponent),
    },
)
"""The rules of Headrace."""

BUILT_IN = frozenset(SELECTION_RULES)
"""The names of the rules that are used without checks."""


def stored_rule(name: str) -> SelectionRule:
    """The rule of a run that was created with it. Raises SelectionRuleFailed if its package is gone."""
    try:
        return SELECTION_RULES.find(name)
    except InvalidRequest as error:
        raise SelectionRuleFailed(error.detail, hint=error.hint, rule=name) from error


def rule_failure(name: str, failure: str) -> SelectionRuleFailed:
    """The error of a rule of another package. ``failure`` is a predicate, such as "yielded None"."""
    shown = failure if len(failure) <= MAX_SHOWN else f"{failure[: MAX_SHOWN - 3]}..."
    return SelectionRuleFailed(
        f"Selection rule {name!r} {shown}.", hint="Correct the rule, or create a run with another one.", rule=name
    )


def rule_raised(name: str, error: BaseException) -> SelectionRuleFailed:
    """The error of a rule of another package that raised."""
    try:
        return rule_failure(name, f"raised {type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001  the error has no text
        return rule_failure(name, f"raised {type(error).__name__}")


def own_weight(name: str, weight: Callable[[float, float], float], priority: float, exponent: float) -> float:
    """The weight that a rule of another package returns. Raises SelectionRuleFailed if it cannot be used."""
    try:
        value = weight(priority, exponent)
        usable = isinstance(value, Real) and 0 < value <= MAX_WEIGHT
        if usable:
            return float(value)
        shown = repr(value)[:MAX_VALUE]
    except (Exception, SystemExit) as error:
        raise rule_raised(name, error) from error
    raise rule_failure(
        name,
        f"returned the weight {shown} for priority {priority:g} and exponent {exponent:g}, which is not a number above "
        f"0 and up to {MAX_WEIGHT:g}",
    )

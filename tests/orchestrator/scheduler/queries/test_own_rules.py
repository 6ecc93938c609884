"""Selection rules of other packages that fail."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import cycle, repeat
from typing import Any

import pytest

from headrace.errors import SelectionRuleFailed
from headrace.estimators import ESTIMATORS, Estimator
from headrace.selection import SELECTION_RULES, SelectionRule
from headrace_orchestrator.scheduler.queries import selection
from tests.orchestrator.scheduler.harness import Harness
from tests.orchestrator.scheduler.scenarios import eligible_harness

Order = Callable[[Any], Any]
Weight = Callable[[float, float], Any]


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise ValueError


def raises_without_text(*arguments: object) -> float:
    raise WithoutTextError


def draws_for_ever(groups: Any) -> Any:
    while True:
        yield from (group for group in groups.drawn() if group.priority > 1)


def draws_none_for_ever(groups: Any) -> Any:
    first = groups.drawn()
    all_drawn = [next(first), next(first), next(first)]
    while all_drawn:
        yield from groups.drawn()


def own_harness(monkeypatch: pytest.MonkeyPatch, order: Order, weight: Weight | None = None, **spec: Any) -> Harness:
    """A run with three eligible groups and a rule of another package."""
    monkeypatch.setitem(SELECTION_RULES, "own", SelectionRule(order, weight))
    return eligible_harness("own", groups=3, batch_size=3, **spec)


def drawn(groups: Any) -> Any:
    return groups.drawn()


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (lambda groups: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda groups: sys.exit("over"), "raised SystemExit: over"),
        (raises_without_text, "raised WithoutTextError"),
        (lambda groups: (group.gone for group in groups.in_order()), "raised AttributeError"),
        (lambda groups: next(iter(())), "raised StopIteration"),
        (lambda groups: None, "raised TypeError"),
        (5, "raised TypeError"),
        (lambda groups: cycle([next(groups.in_order())]), "yielded group g0 twice"),
        (lambda groups: repeat("g0"), "yielded 'g0', which is not an eligible group"),
        (lambda groups: (None for _ in groups.in_order()), "yielded None, which is not an eligible group"),
        (lambda groups: (type(group)(*[None] * 9) for group in groups.in_order()), "raised TypeError"),
        (draws_for_ever, "read groups without end"),
        (draws_none_for_ever, "read groups without end"),
    ],
)
def test_an_order_that_fails_is_a_typed_error_that_names_it_and_leaves_the_groups_eligible(
    order: Order, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_READS", 1000)
    harness = own_harness(monkeypatch, order)
    with pytest.raises(SelectionRuleFailed, match=f"Selection rule 'own' {said}") as caught:
        harness.pull()
    assert caught.value.extra == {"rule": "own"}
    monkeypatch.setitem(SELECTION_RULES, "own", SelectionRule(drawn))
    assert sorted(harness.batch().groups) == ["g0", "g1", "g2"]


def test_an_order_yields_no_group_of_another_run_or_one_that_is_stale_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def keeps(groups: Any) -> Any:
        kept.extend(groups.in_order())
        return iter(kept)

    harness = own_harness(monkeypatch, keeps)
    harness.batch()
    harness.submit("h0", "h1", "h2")
    harness.work()
    with pytest.raises(SelectionRuleFailed, match="yielded group g0, which is not an eligible group of the pull"):
        harness.pull("other", learner="other")


UNUSABLE: list[tuple[Weight, str]] = [
    (lambda priority, exponent: 1 / 0, "raised ZeroDivisionError: division by zero"),
    (lambda priority, exponent: sys.exit("over"), "raised SystemExit: over"),
    (raises_without_text, "raised WithoutTextError"),
    (lambda priority, exponent: math.nan, "returned the weight nan for priority 1 and exponent 1"),
    (lambda priority, exponent: math.inf, "returned the weight inf"),
    (lambda priority, exponent: 1e61, r"returned the weight 1e\+61 .* which is not a number above 0 and up to 1e\+60"),
    (lambda priority, exponent: 10**400, "returned the weight 10000"),
    (lambda priority, exponent: 0.0, "returned the weight 0.0"),
    (lambda priority, exponent: -1.0, "returned the weight -1.0"),
    (lambda priority, exponent: "1", "returned the weight '1'"),
    (lambda priority, exponent: None, "returned the weight None"),
    (lambda priority, exponent: 1j, r"returned the weight 1j"),
]


@pytest.mark.parametrize(("weight", "said"), UNUSABLE)
def test_a_weight_that_cannot_be_used_fails_the_pull_and_never_an_event(
    weight: Weight, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = own_harness(monkeypatch, drawn, weight)
    harness.prioritize({"g1": 1.0})
    harness.restart()
    with pytest.raises(SelectionRuleFailed, match=f"Selection rule 'own' {said}") as caught:
        harness.pull()
    assert caught.value.extra == {"rule": "own"}
    reasons = {reason.code: reason for reason in harness.status().reasons}
    assert reasons["selection-rule-failing"].message == str(caught.value)
    monkeypatch.setitem(SELECTION_RULES, "own", SelectionRule(drawn, lambda priority, exponent: priority))
    harness.core = harness.replayed()
    assert sorted(harness.batch().groups) == ["g0", "g1", "g2"]
    assert "selection-rule-failing" not in [reason.code for reason in harness.status().reasons]


def test_weights_are_computed_again_when_the_next_pull_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[float] = []
    harness = own_harness(monkeypatch, drawn, lambda priority, exponent: works[0])
    with pytest.raises(SelectionRuleFailed, match="raised IndexError"):
        harness.pull()
    works.append(2.0)
    assert sorted(harness.batch().groups) == ["g0", "g1", "g2"]


def test_a_priority_that_the_weight_can_use_ends_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = own_harness(monkeypatch, drawn, lambda priority, exponent: priority - 1)
    with pytest.raises(SelectionRuleFailed, match=r"returned the weight 0.0 for priority 1"):
        harness.pull()
    harness.prioritize(dict.fromkeys(["g0", "g1", "g2"], 2.0))
    assert sorted(harness.batch().groups) == ["g0", "g1", "g2"]


def test_a_rule_whose_package_is_gone_fails_the_pulls_of_its_run_and_not_the_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = own_harness(monkeypatch, drawn)
    monkeypatch.delitem(SELECTION_RULES, "own")
    harness.restart()
    with pytest.raises(SelectionRuleFailed, match="No selection rule 'own'"):
        harness.pull()
    assert "selection-rule-failing" in [reason.code for reason in harness.status().reasons]
    monkeypatch.setitem(SELECTION_RULES, "own", SelectionRule(drawn))
    harness.restart()
    assert sorted(harness.batch().groups) == ["g0", "g1", "g2"]


def test_an_estimator_whose_package_is_gone_does_not_fail_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "own", Estimator(lambda inputs: inputs.returns))
    harness = eligible_harness("fifo", groups=3, batch_size=3, estimator={"name": "own"})
    monkeypatch.delitem(ESTIMATORS, "own")
    harness.restart()
    assert harness.batch().groups == ["g0", "g1", "g2"]


def test_a_pull_by_name_needs_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = own_harness(monkeypatch, lambda groups: 1 / 0)
    with pytest.raises(SelectionRuleFailed):
        harness.pull()
    assert harness.batch(groups=["g1"], request="named").groups == ["g1"]

"""Selection of the eligible groups for the next batch.

* A batch takes whole groups: as many as the run spec sets, or up to its budget of tokens.
* A batch is smaller by the zero-variance groups dropped from it; groups that are replaced do not shrink it.
* Fifo serves the oldest dispatch first, lifo the newest; uniform and prioritized draw by exact weights, without
  replacement.
* A draw depends on the run's seed, the batches formed so far and the eligible groups alone; a replay draws the same.
* Fifo passes over an older group in flight only while that can still be served in the batch after; else it waits.
* Groups that do not fit the filter of a pull are never chosen, and never waited for.
* Selection reads only the groups that it takes.
* A rule of another package that raises, yields a group twice or no eligible group, or reads without end fails typed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

from headrace.errors import SelectionRuleFailed
from headrace.selection import BUILT_IN, MAX_VALUE, SelectionRule, rule_failure, rule_raised, stored_rule
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, GroupFilter, kind_of
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run

MAX_READS = 1_000_000
READS_PER_GROUP = 64
"""Groups that a rule of another package may read for one batch: this many, or this many times the eligible ones. A rule
that reads more would never end."""


def choose(run: Run, filter: GroupFilter) -> list[Group]:
    """The groups of the next batch, in its order; none if too few are eligible. Raises SelectionRuleFailed."""
    rule = stored_rule(run.spec.selection.order)
    last = run.spec.partial_batches and _is_last(run)
    room = _room(run, filter)
    if not last and run.eligible.count(filter) < room.groups:
        return []
    run.eligible.require_weights()
    awaited = awaited_group(run, filter)
    if awaited is not None and _is_short_before(run, filter, awaited, room, rule):
        return []
    with closing(_Eligible(run, filter)) as groups:
        ordered = rule.order(groups) if run.spec.selection.order in BUILT_IN else _checked(rule, groups)
        if awaited is not None:
            ordered = (group for group in ordered if group.dispatch_order < awaited.dispatch_order)
        taken, enough = _fill(room, ordered)
    return taken if enough or last else []


def awaited_group(run: Run, filter: GroupFilter) -> Group | None:
    """The oldest open group that a batch must not pass over, as the run's rule demands; None if there is none.

    A batch made now is acked before the next one is formed, and so may be all batches that are held: the version then
    is that many steps ahead. Groups that are passed over come first then, a batch of them at a time. A group that would
    be out of bound at its turn is waited for. With several uses, used groups come before it again and again, so no
    group is passed over.
    """
    try:
        waits = stored_rule(run.spec.selection.order).waits
    except SelectionRuleFailed:
        return None  # the pull says so
    if not waits:
        return None
    steps = len(run.batches) + 1
    slack = run.spec.max_staleness - steps if run.spec.max_uses == 1 else -1
    passed = 0
    for group in run.in_progress.values():
        if filter.fits(kind_of(group.task)):
            behind = run.behind(group)
            if behind is not None and behind + passed // run.ledger.batch_groups > slack:
                return group
            passed += 1
    return None


def _is_short_before(run: Run, filter: GroupFilter, awaited: Group, room: _BatchRoom, rule: SelectionRule) -> bool:
    """True if too few groups were dispatched before the awaited one; decided without reading them."""
    counted = room.tokens is None and rule.weight is None
    return counted and run.eligible.weight_before(filter, awaited.dispatch_order) < room.groups


class _BatchRoom(NamedTuple):
    """Room of a batch; without ``tokens`` only the number of groups counts."""

    groups: int
    tokens: int | None


def _room(run: Run, filter: GroupFilter) -> _BatchRoom:
    """The size of a batch without the zero-variance groups that were dropped from it; at least one."""
    spec = run.spec
    dropped, tokens = 0, 0
    if spec.zero_variance == "drop" and filter == EVERYTHING:
        dropped, tokens = run.zero_variance_since_batch, run.zero_variance_tokens
    return _BatchRoom(
        max(1, spec.batch_groups - dropped), None if spec.batch_tokens is None else max(1, spec.batch_tokens - tokens)
    )


class _Eligible:
    """The eligible groups that fit a filter, as a selection rule reads them. ``close`` puts drawn groups back."""

    def __init__(self, run: Run, filter: GroupFilter) -> None:
        self._run = run
        self._filter = filter
        self._draws = ExitStack()
        self.name = run.spec.selection.order
        self._reads_left = max(MAX_READS, READS_PER_GROUP * len(run.eligible))

    def in_order(self, *, backwards: bool = False) -> Iterator[Group]:
        return self._bounded(self._run.eligible.in_order(self._filter, backwards=backwards))

    def drawn(self) -> Iterator[Group]:
        run = self._run
        draw = run.eligible.drawn(self._filter, _SeededDraw(run.spec.seed, run.batches_formed).below)
        return self._bounded(self._draws.enter_context(closing(draw)))

    def has(self, group: object) -> bool:
        """True for an eligible group that fits the filter."""
        return isinstance(group, Group) and self._run.eligible.may_be_chosen(group, self._filter)

    def _bounded(self, groups: Iterator[Group]) -> Iterator[Group]:
        """The groups, counted for a rule of another package; each call counts as well, as an empty one could repeat."""
        if self.name in BUILT_IN:
            return groups
        self._count_read()
        return map(self._counted, groups)

    def _counted(self, group: Group) -> Group:
        self._count_read()
        return group

    def _count_read(self) -> None:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise rule_failure(self.name, "read groups without end")

    def close(self) -> None:
        self._draws.close()


def _checked(rule: SelectionRule, groups: _Eligible) -> Iterator[Group]:
    """The groups in the order of a rule of another package. Raises SelectionRuleFailed."""
    yielded: set[int] = set()
    try:
        for group in rule.order(groups):
            if not groups.has(group):
                shown = f"group {group.id}" if isinstance(group, Group) else repr(group)[:MAX_VALUE]
                raise rule_failure(groups.name, f"yielded {shown}, which is not an eligible group of the pull")
            if group.dispatch_order in yielded:
                raise rule_failure(groups.name, f"yielded group {group.id} twice")
            yielded.add(group.dispatch_order)
            yield group
    except SelectionRuleFailed:
        raise
    except (Exception, SystemExit) as error:
        raise rule_raised(groups.name, error) from error


def _fill(room: _BatchRoom, groups: Iterator[Group]) -> tuple[list[Group], bool]:
    """Groups of a batch, and True if they fill it."""
    taken: list[Group] = []
    total = 0
    for group in groups:
        tokens = max(1, group.row_tokens)
        if room.tokens is not None and taken and total + tokens > room.tokens:
            return taken, True
        taken.append(group)
        total += tokens
        if total >= room.tokens if room.tokens is not None else len(taken) == room.groups:
            return taken, True
    return taken, False


def _is_last(run: Run) -> bool:
    """True if a fixed list will give no more groups than are eligible now."""
    return not run.open and run.exhausted and (run.spec.max_uses == 1 or not run.batches)


class _SeededDraw:
    """Random numbers that depend only on the seed, the batch and their place."""

    def __init__(self, seed: int, batch: int) -> None:
        self._key = f"choice/{seed}/{batch}"
        self._drawn = 0

    def below(self, bound: int) -> int:
        """A number below the bound. With 512 bits the bias of the remainder is negligible."""
        digest = hashlib.blake2b(f"{self._key}/{self._drawn}".encode()).digest()
        self._drawn += 1
        return int.from_bytes(digest, "little") % bound

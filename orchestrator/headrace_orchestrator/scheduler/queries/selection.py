"""Which eligible groups the next batch takes.

* A batch takes whole groups: as many as the run says, or up to its budget of tokens.
* A batch that zero-variance groups were dropped from is smaller by them; where they are replaced it is not.
* Fifo and lifo go by dispatch order; uniform and prioritized draw without replacement, by exact weights.
* A draw hangs on the run's seed, the batches formed so far and the eligible groups alone, so that a replay draws alike.
* What does not fit the filter of a pull is not taken.
* Choosing looks at the groups that it takes, not at those that it leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

from headrace.selection import find_selection_rule
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING, Filter
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run


def choose(run: Run, filter: Filter) -> list[Group]:
    """The groups of the next batch, in its order; none where there are too few."""
    last = run.spec.partial_batches and nothing_else_comes(run)
    room = _room(run, filter)
    if not last and run.eligible.count(filter) < room.groups:
        return []
    rule = find_selection_rule(run.spec.selection.order)
    with closing(_Eligible(run, filter)) as groups:
        taken, enough = _fill(room, rule.order(groups))
    return taken if enough or last else []


class _Room(NamedTuple):
    """What a batch has room for; ``tokens`` None: only the number of groups counts."""

    groups: int
    tokens: int | None


def _room(run: Run, filter: Filter) -> _Room:
    """What is left of a batch's size by the zero-variance groups that were dropped from it; never nothing."""
    spec = run.spec
    dropped, tokens = 0, 0
    if spec.zero_variance == "drop" and filter == EVERYTHING:
        dropped, tokens = run.zero_variance_since_batch, run.zero_variance_tokens
    return _Room(
        max(1, spec.batch_groups - dropped), None if spec.batch_tokens is None else max(1, spec.batch_tokens - tokens)
    )


class _Eligible:
    """The eligible groups that fit a filter, as a selection rule sees them. Closed, it puts back what was drawn."""

    def __init__(self, run: Run, filter: Filter) -> None:
        self._run = run
        self._filter = filter
        self._draws = ExitStack()

    def in_order(self, *, backwards: bool = False) -> Iterator[Group]:
        return self._run.eligible.in_order(self._filter, backwards=backwards)

    def drawn(self) -> Iterator[Group]:
        run = self._run
        draw = run.eligible.drawn(self._filter, _Dice(run.spec.seed, run.batches_formed).below)
        return self._draws.enter_context(closing(draw))

    def close(self) -> None:
        self._draws.close()


def _fill(room: _Room, groups: Iterator[Group]) -> tuple[list[Group], bool]:
    """Groups of a batch, and whether they are enough for one."""
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


def nothing_else_comes(run: Run) -> bool:
    """Whether what is eligible now is all that a list will ever give."""
    return not run.open and run.exhausted and (run.spec.max_uses == 1 or not run.batches)


class _Dice:
    """Numbers that depend on the seed, the batch and their place alone."""

    def __init__(self, seed: int, batch: int) -> None:
        self._key = f"choice/{seed}/{batch}"
        self._drawn = 0

    def below(self, bound: int) -> int:
        """A number below the bound. 512 bits are so many more than a bound has that none is favoured."""
        digest = hashlib.blake2b(f"{self._key}/{self._drawn}".encode()).digest()
        self._drawn += 1
        return int.from_bytes(digest, "little") % bound

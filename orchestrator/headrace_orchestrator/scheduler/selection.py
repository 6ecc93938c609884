"""Which eligible groups the next batch takes.

* A batch takes whole groups: as many as the run says, or up to its budget of tokens.
* Fifo and lifo go by dispatch order; uniform and prioritized draw without replacement, by exact weights.
* A draw hangs on the run's seed, the batches formed so far and the eligible groups alone, so that a replay draws alike.
* What does not fit the filter of a pull is not taken.
* Choosing looks at the groups that it takes, not at those that it leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import closing

from headrace.runspec import RunSpec
from headrace_orchestrator.scheduler.filters import Filter
from headrace_orchestrator.scheduler.runs import Run
from headrace_orchestrator.scheduler.states import Group


def choose(run: Run, filter: Filter) -> list[Group]:
    """The groups of the next batch, in its order; none where there are too few."""
    last = run.spec.partial_batches and nothing_else_comes(run)
    need = run.spec.batch_groups
    if not last and run.shelves.count(filter) < need:
        return []
    with closing(_in_turn(run, filter)) as groups:
        taken, enough = _fill(run.spec, groups)
    return taken if enough or last else []


def _in_turn(run: Run, filter: Filter) -> Generator[Group, None, None]:
    order = run.spec.selection.order
    if order in ("fifo", "lifo"):
        yield from run.shelves.in_order(filter, backwards=order == "lifo")
    else:
        with closing(run.shelves.drawn(filter, _Dice(run.spec.seed, run.batches_formed).below)) as drawn:
            yield from drawn


def _fill(spec: RunSpec, groups: Iterator[Group]) -> tuple[list[Group], bool]:
    """Groups of a batch, and whether they are enough for one."""
    taken: list[Group] = []
    budget = spec.batch_tokens
    total = 0
    for group in groups:
        tokens = max(1, group.row_tokens)
        if budget is not None and taken and total + tokens > budget:
            return taken, True
        taken.append(group)
        total += tokens
        if total >= budget if budget is not None else len(taken) == spec.batch_groups:
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

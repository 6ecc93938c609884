"""Filters of pulls, by environment and by tags.

* A group fits if the filter names its environment, and it has every tag that the filter names.
* A filter without names fits every group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.runspec import RunSpec
from headrace.trajectory import Task

TaskKind = tuple[str, tuple[str, ...]]
"""The part of a task that filters read: its environment, and its tags in order."""


def kind_of(task: Task) -> TaskKind:
    """The kind of a task."""
    return task.environment, tuple(sorted(set(task.tags))) if task.tags else ()


def kinds_of(spec: RunSpec) -> frozenset[TaskKind] | None:
    """The kinds of the tasks of the run's own source; None if the learner submits them."""
    if spec.source == "learner":
        return None
    kinds = {(entry.id, tuple(sorted(set(entry.tags)))) for entry in spec.environments}
    return frozenset(kinds | {(task.environment, tuple(sorted(set(task.tags)))) for task in spec.tasks or ()})


class GroupFilter(NamedTuple):
    """The filter of a pull. No environments: any environment fits."""

    environments: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, environments: Iterable[str], tags: Iterable[str]) -> GroupFilter:
        """The filter of a pull."""
        return cls(frozenset(environments), frozenset(tags))

    def fits(self, kind: TaskKind) -> bool:
        """True if groups of the kind fit."""
        environment, tags = kind
        return (not self.environments or environment in self.environments) and self.tags.issubset(tags)

    def __str__(self) -> str:
        parts = [
            f"{name} {sorted(words)}"
            for name, words in (("environments", self.environments), ("tags", self.tags))
            if words
        ]
        return " and ".join(parts) or "no filter"


EVERYTHING = GroupFilter()
"""The filter that fits every group."""

"""Which groups a pull asks for: by environment and by tags.

* A group fits if its environment is one of those named, and it carries every tag that is named.
* A filter that names nothing lets everything through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.runspec import RunSpec
from headrace.trajectory import Task

Kind = tuple[str, tuple[str, ...]]
"""What filters see of a task: its environment, and its tags in order."""


def kind_of(task: Task) -> Kind:
    """The kind of a task."""
    return task.environment, tuple(sorted(set(task.tags))) if task.tags else ()


def kinds_of(spec: RunSpec) -> frozenset[Kind] | None:
    """The kinds of all tasks that the run has of its own; None where the learner submits them."""
    if spec.source == "learner":
        return None
    named = {(entry.id, tuple(sorted(set(entry.tags)))) for entry in spec.environments}
    return frozenset(named | {(task.environment, tuple(sorted(set(task.tags)))) for task in spec.tasks or ()})


class Filter(NamedTuple):
    """What a pull asks for. No environments: any will do."""

    environments: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, environments: Iterable[str], tags: Iterable[str]) -> Filter:
        """The filter of a pull."""
        return cls(frozenset(environments), frozenset(tags))

    def fits(self, kind: Kind) -> bool:
        """Whether groups of the kind are asked for."""
        environment, tags = kind
        return (not self.environments or environment in self.environments) and self.tags.issubset(tags)

    def __str__(self) -> str:
        parts = [
            f"{name} {sorted(words)}"
            for name, words in (("environments", self.environments), ("tags", self.tags))
            if words
        ]
        return " and ".join(parts) or "no filter"


EVERYTHING = Filter()
"""Lets everything through."""

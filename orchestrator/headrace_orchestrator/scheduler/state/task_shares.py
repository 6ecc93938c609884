"""Shares of kinds of tasks: groups that were drawn and groups that were trained on, by environment and by tag.

* A group counts as drawn at its admission, and as trained at the first ack of a batch that holds it.
* Memory is bounded: environments and tags beyond ``MAX_NAMES`` are counted together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from headrace.trajectory import Task
from headrace.wire.messages import TaskShare

MAX_NAMES = 256
"""Maximum number of environments and tags that are counted separately: a list may give each task a tag of its own."""

OTHER = "other"


class TaskShares:
    """The counts of one run. Keys are ``environment=NAME`` and ``tag=NAME``."""

    __slots__ = ("drawn", "trained")

    def __init__(self) -> None:
        self.drawn: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()

    def count_drawn(self, task: Task) -> None:
        """Count a group that was admitted."""
        self._count(self.drawn, task)

    def count_trained(self, task: Task) -> None:
        """Count a group whose batch was acked."""
        self._count(self.trained, task)

    def _count(self, counts: Counter[str], task: Task) -> None:
        counts[self._key("environment", task.environment)] += 1
        for tag in task.tags:
            counts[self._key("tag", tag)] += 1

    def _key(self, kind: str, name: str) -> str:
        key = f"{kind}={name}"
        return key if key in self.drawn or len(self.drawn) < MAX_NAMES else f"{kind}={OTHER}"

    def listed(self) -> list[TaskShare]:
        """The counts, environments before tags, in the order of their names."""
        return list(self._listed())

    def _listed(self) -> Iterator[TaskShare]:
        for key in sorted({*self.drawn, *self.trained}):
            kind, _, name = key.partition("=")
            yield TaskShare(kind=kind, name=name, drawn=self.drawn[key], trained=self.trained[key])

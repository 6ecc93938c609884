"""Sources of a run's tasks: a mixture, a fixed list, or the learner.

* The draws of a run depend on its seed and the position alone, never on timing.
* A list is used in order, once for each of its epochs; then it is over.
* No global generator is used; every number is a hash of its seed and place.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from itertools import accumulate
from typing import Protocol

import msgspec

from headrace.runspec import EnvironmentSpec, RunSpec
from headrace.trajectory import Task

_SEED_BITS = 31
"""Environment seeds fit every generator, NumPy's legacy one and C's included."""

_SAMPLING_BITS = 53
"""Sampling seeds fit a JSON number that every reader keeps exact."""


def draw(key: str) -> int:
    """64 bits that depend on the key alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def sampling_seed(seed: int, group: int | str, member: int) -> int:
    """The seed of one episode's sampling. ``group`` is its position, or its id if it has none."""
    return draw(f"sampling/{seed}/{group}/{member}") >> (64 - _SAMPLING_BITS)


def task_key(task: Task) -> bytes:
    """The identity of a task: all of it except the submitter's id and tags."""
    return msgspec.json.encode((task.environment, task.seed, task.kwargs, task.example), order="deterministic")


class TaskSource(Protocol):
    """Tasks by position, from 0."""

    def task(self, position: int) -> Task | None:
        """The task at a position; None from the end on."""


class MixtureSource:
    """Environments drawn by weight, without end."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._bounds = list(accumulate(entry.weight for entry in spec.environments))

    def task(self, position: int) -> Task | None:
        entry = self._entry(position)
        return Task(
            environment=entry.id,
            seed=draw(f"environment/{self._spec.seed}/{position}") >> (64 - _SEED_BITS),
            kwargs=entry.kwargs,
            id=str(position),
            tags=entry.tags,
        )

    def _entry(self, position: int) -> EnvironmentSpec:
        entries = self._spec.environments
        if len(entries) == 1:
            return entries[0]
        point = draw(f"mixture/{self._spec.seed}/{position}") / 2**64 * self._bounds[-1]
        return entries[min(bisect_right(self._bounds, point), len(entries) - 1)]


class ListSource:
    """A fixed list, in order, ``epochs`` times."""

    def __init__(self, spec: RunSpec) -> None:
        self._tasks = [
            Task(
                environment=task.environment,
                seed=task.seed,
                kwargs=task.kwargs,
                example=task.example,
                id=task.id or str(index),
                tags=task.tags,
            )
            for index, task in enumerate(spec.tasks or [])
        ]
        self._end = len(self._tasks) * spec.epochs

    def task(self, position: int) -> Task | None:
        return self._tasks[position % len(self._tasks)] if position < self._end else None


class LearnerSource:
    """An empty source: the learner submits groups."""

    def task(self, position: int) -> Task | None:
        return None


def source_of(spec: RunSpec) -> TaskSource:
    """The source that a spec describes."""
    if spec.source == "list":
        return ListSource(spec)
    return MixtureSource(spec) if spec.source == "mixture" else LearnerSource()

"""Sources of a run's tasks: a mixture, a fixed list, or the learner.

* The draws of a run depend on its seed and the position alone, never on timing.
* A list is used in order, once for each of its epochs; then it is over.
* Quarantined tasks are skipped; the work of it is bounded by the tasks of a list, whatever its epochs.
* No global generator is used; every number is a hash of its seed and place.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Container
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

    def next_task(self, position: int, quarantined: Container[bytes]) -> tuple[int, Task] | None:
        """The first task from a position on whose key is not quarantined, with its position; None at the end. A key
        stays quarantined from call to call."""


class MixtureSource:
    """Environments drawn by weight, without end."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._bounds = list(accumulate(entry.weight for entry in spec.environments))

    def next_task(self, position: int, quarantined: Container[bytes]) -> tuple[int, Task] | None:
        task = self._task(position)
        while quarantined and task_key(task) in quarantined:
            position += 1
            task = self._task(position)
        return position, task

    def _task(self, position: int) -> Task:
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
        #: By the index of a quarantined task, an index before which all others from it on are quarantined too.
        self._skips: dict[int, int] = {}

    def next_task(self, position: int, quarantined: Container[bytes]) -> tuple[int, Task] | None:
        if position < self._end and quarantined:
            epoch, index = divmod(position, len(self._tasks))
            index = self._skip_quarantined(index, quarantined)
            if index == len(self._tasks):
                epoch, index = epoch + 1, self._skip_quarantined(0, quarantined)
            if index == len(self._tasks):
                return None
            position = epoch * len(self._tasks) + index
        return (position, self._tasks[position % len(self._tasks)]) if position < self._end else None

    def _skip_quarantined(self, index: int, quarantined: Container[bytes]) -> int:
        """The first index from one on whose task is not quarantined; the length of the list if there is none. Each task
        is found quarantined once; later searches jump over it."""
        passed: list[int] = []
        while index < len(self._tasks):
            following = self._skips.get(index)
            if following is None:
                if task_key(self._tasks[index]) not in quarantined:
                    break
                following = index + 1
            passed.append(index)
            index = following
        for one in passed:
            self._skips[one] = index
        return index


class LearnerSource:
    """An empty source: the learner submits groups."""

    def next_task(self, position: int, quarantined: Container[bytes]) -> tuple[int, Task] | None:
        return None


def source_of(spec: RunSpec) -> TaskSource:
    """The source that a spec describes."""
    if spec.source == "list":
        return ListSource(spec)
    return MixtureSource(spec) if spec.source == "mixture" else LearnerSource()

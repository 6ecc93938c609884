"""The failure streak of a run: its failures since the last usable record, and whether they look like an outage.

* Failures of many distinct tasks are an outage; those of a few are the fault of these tasks, however many they are.
* A failure that no task causes, as of an unreachable policy server, counts each time.
* Groups at workers, which may be of good tasks that take longer, count against an outage.
* A few tasks that fail without end are an outage as well.

It is soft: a restart counts anew, from the newest file of the log on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

OUTAGE_FAILURES = 16
"""Distinct tasks, or failures that no task causes, from which on a streak is an outage: broken tasks of a list seldom
come in so long a row."""

ATTEMPTS_PER_MEMBER = 3
"""Failed attempts of each member of so many groups, from which on a streak of fewer tasks is an outage: the default
budget of an episode, after which a broken task is quarantined."""

TASKS_PER_GROUP = 2
"""Failed tasks for each group at workers, from which on a streak is an outage: while a large fleet fills its slots, as
many broken tasks of a half-broken list fail as good ones begin."""

REMEMBERED_TASKS = 1024
"""Tasks that are told apart: more than any fleet has at work in one moment of an outage."""


@dataclass(slots=True)
class FailureStreak:
    """The streak of one run. ``tasks``: digests of the tasks that failed, with their failed attempts. ``causeless``:
    failures that no task causes."""

    tasks: dict[bytes, int] = field(default_factory=dict)
    attempts: int = 0
    causeless: int = 0

    def add(self, key: bytes | None) -> None:
        """Count a failed attempt of the task with that key; None for a failure that no task causes."""
        self.attempts += 1
        if key is None:
            self.causeless += 1
            return
        digest = hashlib.blake2b(key, digest_size=8).digest()
        self.tasks[digest] = self.tasks.get(digest, 0) + 1
        if len(self.tasks) > REMEMBERED_TASKS:
            del self.tasks[next(iter(self.tasks))]

    def end(self) -> None:
        """Forget the failures: there is a usable record."""
        self.tasks.clear()
        self.attempts = self.causeless = 0

    @property
    def may_become_outage(self) -> bool:
        """True if so much failed that tasks which have not failed should be tried first."""
        return len(self.tasks) + self.causeless >= OUTAGE_FAILURES // 4

    def is_outage(self, group_size: int, leased: int) -> bool:
        """True if the failures look like an outage, while ``leased`` attempts of groups of that size are at workers."""
        distinct = max(OUTAGE_FAILURES, min(REMEMBERED_TASKS, TASKS_PER_GROUP * leased // group_size))
        return (
            self.causeless >= OUTAGE_FAILURES
            or len(self.tasks) + self.causeless >= distinct
            or self.attempts >= OUTAGE_FAILURES * ATTEMPTS_PER_MEMBER * group_size
        )

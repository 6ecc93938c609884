"""An oracle of valid batches that reads the events alone, without the scheduler's state or code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headrace.runspec import RunSpec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events


class RunEvents:
    """The events of one run, sorted by subject."""

    def __init__(self) -> None:
        self.admitted: dict[str, events.GroupAdmitted] = {}
        self.members: dict[str, list[str]] = {}
        self.dispatched: set[str] = set()
        self.ended: dict[str, events.EpisodeEnded] = {}
        #: Groups that may lack members which were never dispatched.
        self.given_up: set[str] = set()
        self.retired: set[str] = set()
        self.batches: dict[str, list[str]] = {}
        self.uses: Counter[str] = Counter()
        self.now = Version(0, 0)
        self.forks: dict[int, Version] = {}

    def take(self, event: events.AnyEvent) -> None:
        """Add an event."""
        match event:
            case events.GroupAdmitted():
                self.admitted[event.group] = event
                self.members[event.group] = [member.episode for member in event.members]
            case events.MemberAdded():
                self.members[event.group].append(event.member.episode)
            case events.Dispatched():
                self.dispatched.update(grant.episode for grant in event.grants)
            case events.EpisodeEnded():
                self.ended[event.episode] = event
            case events.GroupCut():
                self.given_up.add(event.group)
            case events.TaskQuarantined():
                same = (event.task.environment, event.task.seed)
                self.given_up.update(g for g, a in self.admitted.items() if (a.task.environment, a.task.seed) == same)
            case events.GroupRetired():
                self.retired.add(event.group)
            case events.BatchFormed():
                self.batches[event.batch] = event.groups
            case events.BatchDissolved():
                del self.batches[event.batch]
            case events.BatchAcked():
                self.uses.update(self.batches.pop(event.batch))
                self._announce(event.version, None)
            case events.VersionAnnounced():
                self._announce(event.version, event.fork)
            case _:
                pass

    def _announce(self, version: Version | None, fork: Version | None) -> None:
        self.now = version or self.now
        if fork is not None and version is not None:
            self.forks[version.lineage] = fork

    def path(self) -> dict[int, float]:
        """The lineages that the current version descends from, each with the last ``n`` on the path."""
        found = {self.now.lineage: math.inf}
        at = self.forks.get(self.now.lineage)
        while at is not None:
            found[at.lineage] = at.n
            at = self.forks.get(at.lineage)
        return found


def batch_faults(
    run: RunEvents, spec: RunSpec, groups: Sequence[tuple[str, list[str]]], request: messages.PullRequest
) -> list[str]:
    """Faults of a batch of these groups and trajectories."""
    found = [f"{id} is in it twice" for id, count in Counter(id for id, _ in groups).items() if count > 1]
    in_batches = {id for ids in run.batches.values() for id in ids}
    path = run.path()
    for id, trajectories in groups:
        admitted = run.admitted[id]
        if id in run.retired or id in in_batches or run.uses[id] >= spec.max_uses:
            found.append(f"{id} is used up, in another batch or retired")
        missing = [e for e in run.members[id] if e not in run.ended]
        if any(e in run.dispatched or id not in run.given_up for e in missing):
            found.append(f"{id} is not complete: {missing}")
        ends = [run.ended[e] for e in run.members[id] if e in run.ended]
        usable = [end for end in ends if end.status in ("finished", "truncated") and end.rewards]
        if [end.trajectory for end in usable] != trajectories or not usable:
            found.append(f"{id} is not its usable members in their order")
        for version in (version for end in usable for version in (end.low, end.high) if version is not None):
            if version.n > path.get(version.lineage, -1):
                found.append(f"{id} has a row of {version}, which a rewind left")
            elif run.now.n - version.n > spec.max_staleness:
                found.append(f"{id} has a row of {version} and is stale")
        if spec.short_groups == "drop" and len(usable) < len(admitted.members):
            found.append(f"{id} is short")
        if admitted.evaluation or (request.groups is not None and id not in request.groups):
            found.append(f"{id} was not requested")
        if request.environments and admitted.task.environment not in request.environments:
            found.append(f"{id} is of {admitted.task.environment}")
        if not set(request.tags) <= set(admitted.task.tags):
            found.append(f"{id} has tags {admitted.task.tags}")
    return found

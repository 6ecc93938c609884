"""A reference model of the buffer in plain dictionaries, which the real one is compared with.

* A group is complete when each of its members has a record. It may be served while its oldest row is within bound; a
  group with a member that began too long ago is retired.
* A batch consists of the first complete groups in the order of their dispatch, as many as the run spec sets.
* A batch is the same bytes at every pull. A group is in one open batch at a time, and in at most as many acked batches
  as the run allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Group:
    """A group. ``live``: episodes at workers, with the version that they began with. ``members``: episodes with a
    record, and its version."""

    id: str
    size: int
    live: dict[str, int] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    uses: int = 0
    batch: str = ""
    """The open batch that it is in."""
    retired: bool = False

    @property
    def low(self) -> int:
        """The lowest version of its rows and live episodes."""
        return min((*self.live.values(), *self.members.values()))

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size


@dataclass
class Batch:
    """A batch as its learner got it."""

    id: str
    groups: list[str]
    body: bytes
    generation: int
    acked: bool = False


@dataclass
class Model:
    """A run without failures: every record belongs to a finished episode."""

    groups_per_batch: int
    group_size: int
    max_staleness: int
    max_uses: int
    version: int = 0
    records: dict[str, bytes] = field(default_factory=dict)
    """Records by episode."""
    groups: dict[str, Group] = field(default_factory=dict)
    """In the order of their first dispatch."""
    batches: dict[str, Batch] = field(default_factory=dict)

    def dispatch(self, group: str, episode: str) -> None:
        """Grant a member to a worker."""
        self.groups.setdefault(group, Group(group, self.group_size)).live[episode] = self.version

    def accept(self, group: str, episode: str, version: int, record: bytes) -> None:
        """Store an acknowledged record."""
        assert episode not in self.records
        self.records[episode] = record
        del self.groups[group].live[episode]
        self.groups[group].members[episode] = version

    def announce(self, version: int) -> None:
        """Announce a newer version, and retire the groups that it leaves too far behind."""
        self.version = version
        for group in self.groups.values():
            group.retired = group.retired or (not group.batch and self.is_stale(group))

    def is_stale(self, group: Group) -> bool:
        """Return whether its oldest row is, or will be, out of bound."""
        return self.version - group.low > self.max_staleness

    def servable(self) -> list[Group]:
        """Groups that a new batch may take, in order."""
        return [
            group
            for group in self.groups.values()
            if group.is_complete
            and not (group.batch or group.retired or self.is_stale(group))
            and group.uses < self.max_uses
        ]

    def next_batch(self) -> list[str] | None:
        """The groups of the next batch; None if too few are ready."""
        groups = [group.id for group in self.servable()[: self.groups_per_batch]]
        return groups if len(groups) == self.groups_per_batch else None

    def form(self, batch: Batch) -> None:
        """Add a new batch that was served."""
        for id in batch.groups:
            self.groups[id].batch = batch.id
        self.batches[batch.id] = batch

    def dissolve(self, batch: str) -> None:
        """Remove a batch that is never served again; its groups are free."""
        for id in self.batches.pop(batch).groups:
            self.groups[id].batch = ""

    def ack(self, batch: str, version: int) -> None:
        """Ack a batch: each of its groups has one more use."""
        self.batches[batch].acked = True
        for id in self.batches[batch].groups:
            self.groups[id].batch = ""
            self.groups[id].uses += 1
        self.announce(version)

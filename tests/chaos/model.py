"""What a buffer has to do, in plain dictionaries: the reference that the real one is held against.

* A group is complete when each of its members has a record; it may be served while its oldest row is within bound, and
  one whose member began too long ago is not waited for.
* A batch is the first complete groups in the order of their dispatch, as many as the run says.
* A batch of one id is the same bytes for ever; a group is in one open batch at a time and in no more acked ones than
  the run allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Group:
    """``live``: episodes at workers, and the version that they began with. ``members``: those that have a record, and
    its version."""

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
        """The version that its staleness counts from."""
        return min((*self.live.values(), *self.members.values()))

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size


@dataclass
class Batch:
    """A batch as its learner knows it."""

    id: str
    groups: list[str]
    body: bytes
    generation: int
    acked: bool = False


@dataclass
class Model:
    """One run without failures: every record is of a finished episode."""

    groups_a_batch: int
    group_size: int
    max_staleness: int
    max_uses: int
    version: int = 0
    records: dict[str, bytes] = field(default_factory=dict)
    """Episode → its record."""
    groups: dict[str, Group] = field(default_factory=dict)
    """In the order of their first dispatch."""
    batches: dict[str, Batch] = field(default_factory=dict)

    def dispatched(self, group: str, episode: str) -> None:
        """A member was granted to a worker."""
        self.groups.setdefault(group, Group(group, self.group_size)).live[episode] = self.version

    def accepted(self, group: str, episode: str, version: int, record: bytes) -> None:
        """A record was acknowledged."""
        assert episode not in self.records
        self.records[episode] = record
        del self.groups[group].live[episode]
        self.groups[group].members[episode] = version

    def announced(self, version: int) -> None:
        """A newer version leaves groups behind, for good."""
        self.version = version
        for group in self.groups.values():
            group.retired = group.retired or (not group.batch and self.is_stale(group))

    def is_stale(self, group: Group) -> bool:
        """Whether its oldest row is, or will be, out of bound."""
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
        """The groups of the next batch, if there is one."""
        found = [group.id for group in self.servable()[: self.groups_a_batch]]
        return found if len(found) == self.groups_a_batch else None

    def formed(self, batch: Batch) -> None:
        """A new batch was served."""
        for id in batch.groups:
            self.groups[id].batch = batch.id
        self.batches[batch.id] = batch

    def dissolved(self, batch: str) -> None:
        """It is never served again; its groups are free."""
        for id in self.batches.pop(batch).groups:
            self.groups[id].batch = ""

    def acked(self, batch: str, version: int) -> None:
        """Each of its groups has one use more."""
        self.batches[batch].acked = True
        for id in self.batches[batch].groups:
            self.groups[id].batch = ""
            self.groups[id].uses += 1
        self.announced(version)

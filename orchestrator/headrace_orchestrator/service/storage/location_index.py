"""The index of locations: the places in the log of the records and heads of groups in flight and open batches.

* The index holds locations, not records: memory grows with the groups in flight, not with the stored data.
* Its content is the same whether events come from commands, from the log, or from a snapshot and the log behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Relocations
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    BatchAcked,
    BatchDissolved,
    BatchFormed,
    EpisodeEnded,
    GroupAdmitted,
    GroupRetired,
)
from headrace_orchestrator.service.storage.group_locations import GroupLocations
from headrace_orchestrator.service.storage.record_events import SCORED


class BatchLocations(NamedTuple):
    """A frozen batch: locations of its head and of its records, in the order of the body."""

    run: str
    head: Location
    members: tuple[Location, ...]

    @property
    def size_bytes(self) -> int:
        return self.head.length + sum(member.length for member in self.members)


class FileInUse(NamedTuple):
    """A file of the log, the run that needs it, and the group or batch that does."""

    file: int
    run: str
    user: str


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    trajectories: int
    groups: dict[str, dict[str, tuple[int, bytes]]]
    batches: dict[str, BatchLocations]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


class LocationIndex:
    """Groups in flight by run and id, open batches by id, and the number of trajectories ever stored."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, GroupLocations]] = {}
        """By run first: ids that learners choose are unique only within a run."""
        self.batches: dict[str, BatchLocations] = {}
        self.trajectories = 0

    def apply(self, event: AnyEvent) -> None:
        """Apply an event that has no frame of its own."""
        match event:
            case GroupAdmitted() if not event.evaluation:
                self.groups.setdefault(event.run, {})[event.group] = GroupLocations(len(event.members))
            case GroupRetired():
                self.groups.get(event.run, {}).pop(event.group, None)
            case BatchAcked() | BatchDissolved():
                self.batches.pop(event.batch, None)
            case _:
                pass  # the event does not concern batches

    def add_trajectory(self, event: EpisodeEnded, location: Location) -> None:
        """Add a stored record."""
        group = self.groups.get(event.run, {}).get(event.group)
        if group is not None and event.status in SCORED:
            group.add(event.trajectory, location)
        self.trajectories += 1

    def add_batch(self, event: BatchFormed, head: Location, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Add a frozen batch; ``groups`` are its trajectories by group. Raises KeyError if one is unknown."""
        members: list[Location] = []
        for group, ids in groups:
            locations = dict(self.groups[event.run][group])
            members += [locations[id] for id in ids]
        self.batches[event.batch] = BatchLocations(event.run, head, tuple(members))

    def oldest_in_use(self, floor: int = 0) -> FileInUse | None:
        """The oldest file of the log that a group in flight or an open batch needs: neither it nor any file behind it
        may be deleted. None if no file is needed. ``floor``: the number of the oldest existing file; the search ends at
        the first user of that file. Groups are searched in the order of admission, so old files are found first."""
        oldest: FileInUse | None = None
        for used in self._files_in_use():
            if oldest is None or used.file < oldest.file:
                oldest = used
                if oldest.file <= floor:
                    break
        return oldest

    def _files_in_use(self) -> Iterator[FileInUse]:
        for id, batch in self.batches.items():
            file = min(batch.head.file, *(member.file for member in batch.members))
            yield FileInUse(file, batch.run, f"batch {id}")
        for run, groups in self.groups.items():
            for id, group in groups.items():
                if group.packed:
                    yield FileInUse(group.first_file, run, f"group {id}")

    def relocate(self, relocations: Relocations) -> None:
        """Update the locations of frames that moved. Searches everything, because this is rare."""
        for groups in self.groups.values():
            for group in groups.values():
                group.relocate(relocations)
        for id, batch in self.batches.items():
            members = tuple(relocations.get(member.position, member) for member in batch.members)
            head = relocations.get(batch.head.position, batch.head)
            self.batches[id] = BatchLocations(batch.run, head, members)

    def group_count(self) -> int:
        """Number of groups: the cost of a snapshot grows with it."""
        return sum(map(len, self.groups.values()))

    def snapshot(self) -> bytes:
        """The whole index as bytes, for ``restore``."""
        groups = {
            run: {id: (group.expected, group.packed) for id, group in groups.items()}
            for run, groups in self.groups.items()
            if groups
        }
        return _encoder.encode(_Snapshot(self.trajectories, groups, self.batches))

    def restore(self, data: bytes) -> None:
        """Restore a snapshot into an empty index. Raises msgspec.MsgspecError."""
        snapshot = _decoder.decode(data)
        self.trajectories = snapshot.trajectories
        self.groups = {
            run: {id: GroupLocations(expected, packed) for id, (expected, packed) in groups.items()}
            for run, groups in snapshot.groups.items()
        }
        self.batches = snapshot.batches

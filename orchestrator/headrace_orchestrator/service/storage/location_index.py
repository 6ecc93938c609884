"""What batches are made of, and where it is: groups in flight and open batches.

* The index holds locations, not records: memory grows with groups in flight, not with what is stored.
* It is the same whether events come from commands, from the log, or from a snapshot and the log behind it.
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
    """A frozen batch: where its head and its records are, in the order of the body."""

    run: str
    head: Location
    members: tuple[Location, ...]

    @property
    def size_bytes(self) -> int:
        return self.head.length + sum(member.length for member in self.members)


class FileInUse(NamedTuple):
    """A file of the log, the run that needs it, and what of the run does."""

    file: int
    run: str
    what: str


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    trajectories: int
    groups: dict[str, dict[str, tuple[int, bytes]]]
    batches: dict[str, BatchLocations]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


class LocationIndex:
    """Groups in flight by run and id, open batches by id; how many trajectories were stored."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, GroupLocations]] = {}
        """By run first: ids that learners choose are unique in a run only."""
        self.batches: dict[str, BatchLocations] = {}
        self.trajectories = 0

    def note(self, event: AnyEvent) -> None:
        """Take an event that has no frame of its own."""
        match event:
            case GroupAdmitted() if not event.evaluation:
                self.groups.setdefault(event.run, {})[event.group] = GroupLocations(len(event.members))
            case GroupRetired():
                self.groups.get(event.run, {}).pop(event.group, None)
            case BatchAcked() | BatchDissolved():
                self.batches.pop(event.batch, None)
            case _:
                pass  # of no concern to batches

    def note_trajectory(self, outcome: EpisodeEnded, location: Location) -> None:
        """Take a stored record."""
        group = self.groups.get(outcome.run, {}).get(outcome.group)
        if group is not None and outcome.status in SCORED:
            group.add(outcome.trajectory, location)
        self.trajectories += 1

    def note_batch(self, formed: BatchFormed, head: Location, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Take a frozen batch; ``groups`` are its trajectories by group. Raises KeyError where one is not known."""
        members: list[Location] = []
        for group, ids in groups:
            places = dict(self.groups[formed.run][group])
            members += [places[id] for id in ids]
        self.batches[formed.batch] = BatchLocations(formed.run, head, tuple(members))

    def oldest_in_use(self, floor: int = 0) -> FileInUse | None:
        """The oldest file of the log that a group in flight or an open batch needs: neither it nor any behind it may be
        deleted. None where nothing is needed. ``floor``: no file is older than this one, so that nothing needs to be
        looked at behind what lies in it; the groups that wait longest are the first that are looked at."""
        oldest: FileInUse | None = None
        for found in self._files_in_use():
            if oldest is None or found.file < oldest.file:
                oldest = found
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

    def move(self, moves: Relocations) -> None:
        """Frames were stored elsewhere than was meant. Looks through everything: it is rare."""
        for groups in self.groups.values():
            for group in groups.values():
                group.move(moves)
        for id, batch in self.batches.items():
            members = tuple(moves.get(member.position, member) for member in batch.members)
            self.batches[id] = BatchLocations(batch.run, moves.get(batch.head.position, batch.head), members)

    def entries(self) -> int:
        """How many groups it holds: what a snapshot costs grows with it."""
        return sum(map(len, self.groups.values()))

    def snapshot(self) -> bytes:
        """All of it, for ``restore``."""
        groups = {
            run: {id: (group.expected, group.packed) for id, group in groups.items()}
            for run, groups in self.groups.items()
            if groups
        }
        return _encoder.encode(_Snapshot(self.trajectories, groups, self.batches))

    def restore(self, data: bytes) -> None:
        """Take a snapshot, into an index that knows nothing yet. Raises msgspec.MsgspecError."""
        found = _decoder.decode(data)
        self.trajectories = found.trajectories
        self.groups = {
            run: {id: GroupLocations(expected, packed) for id, (expected, packed) in groups.items()}
            for run, groups in found.groups.items()
        }
        self.batches = found.batches

"""Where the scheduler's facts go: to the log, to an index of what batches are made of, to the projection.

* The index holds locations, not records: memory grows with groups in flight, not with what is stored.
* Control records that are decided together share frames, in the order in which they were decided.
* Everything that was decided together is encoded before anything of it is stored.
* A trajectory id belongs to one episode, stored or on its way to the disk.
* The index is the same whether facts come from commands or from the log.
* Rows for the projection are written only when their frames are on disk.
* An asset is referred to from the moment at which a record that names it is appended, until the record's file is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace import codec
from headrace.batch import read_manifest
from headrace.codec import TrajectoryHead
from headrace.errors import CorruptRecord
from headrace.logformat import Frame, FrameType
from headrace.manifest import Manifest
from headrace.strands import GroupInput
from headrace.trajectory import Provenance, StopReason, Task
from headrace_orchestrator.buffer.log import Location, Log
from headrace_orchestrator.buffer.projection import (
    Projection,
    Statement,
    asset_reference,
    batch_row,
    batch_settled,
    member_row,
    references_gone,
    trajectory_row,
)
from headrace_orchestrator.scheduler.records import (
    AnyRecord,
    BatchAcked,
    BatchDissolved,
    BatchFormed,
    EpisodeEnded,
    GroupAdmitted,
    GroupRetired,
)
from headrace_orchestrator.service.outcomes import SCORED, outcome_of

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyRecord])

FACTS_A_FRAME = 64
"""Control records that share a frame: enough that its header and checksums cost little, few enough to lose at once."""


class MemberAt(NamedTuple):
    """A usable record: whose it is, and where."""

    episode: str
    location: Location


class GroupAt(NamedTuple):
    """A group in flight: its task, its size at admission, and its usable records by trajectory id."""

    task: Task
    expected: int
    members: dict[str, MemberAt]


class BatchAt(NamedTuple):
    """A frozen batch: where its head and its records are, in the order of the body."""

    run: str
    head: Location
    members: tuple[Location, ...]

    @property
    def size_bytes(self) -> int:
        return self.head.length + sum(member.length for member in self.members)


class Ended(NamedTuple):
    """A terminal record to be stored as its trajectory's own bytes. The outcome is of that record."""

    outcome: EpisodeEnded
    record: bytes
    stop_reason: StopReason
    provenance: Provenance
    assets: Sequence[str]


class Frozen(NamedTuple):
    """A frozen batch to be stored as its head's own bytes; its trajectories by group, in the order of the body."""

    formed: BatchFormed
    head: bytes
    groups: Sequence[tuple[str, Sequence[str]]]


Decided = AnyRecord | Ended | Frozen
"""What is stored: a control record as it is, the others with the bytes of their frames."""


class Store:
    """Log, index and projection of one data directory."""

    def __init__(self, log: Log, projection: Projection) -> None:
        self.log = log
        self.projection = projection
        self.groups: dict[tuple[str, str], GroupAt] = {}
        """By run and group id: ids that learners choose are unique in a run only."""
        self.batches: dict[str, BatchAt] = {}
        self.trajectories = 0
        self._rows: list[Statement] = []
        self._unprojected_ids: dict[str, str] = {}
        self._unprojected_assets: dict[str, int] = {}
        self._projecting = asyncio.Lock()

    # Facts of commands ----------------------------------------------------------------------------------------

    def put(self, decided: Sequence[Decided]) -> None:
        """Store what was decided together, in order. Raises StoreError, or whatever cannot be encoded raises; then
        nothing was stored."""
        for kind, payload, entries in list(_frames(decided)):
            location = self.log.append(kind, payload)
            for entry in entries:
                if isinstance(entry, Ended):
                    self._note_trajectory(entry.outcome, entry.stop_reason, entry.provenance, entry.assets, location)
                elif isinstance(entry, Frozen):
                    self._note_batch(entry.formed, location, entry.groups)
                else:
                    self._note(entry)

    # Facts of the log -----------------------------------------------------------------------------------------

    def facts_of(self, frame: Frame) -> tuple[list[AnyRecord], TrajectoryHead | Manifest | None]:
        """The facts that a frame carries, and what one is read from that has a frame of its own. Raises ValueError,
        MsgspecError or a HeadraceError."""
        if frame.type is FrameType.TRAJECTORY:
            head = codec.decode_head(frame.payload)
            return [outcome_of(head, len(frame.payload))], head
        if frame.type is FrameType.BATCH:
            manifest = read_manifest(frame.payload)
            return [_formed(manifest)], manifest
        return _decoder.decode(frame.payload), None

    def note(self, fact: AnyRecord, source: TrajectoryHead | Manifest | None, location: Location) -> None:
        """Take a fact of the log into the index. Raises KeyError where it builds on a lost one."""
        if isinstance(fact, EpisodeEnded) and isinstance(source, TrajectoryHead):
            names = [asset.name for asset in source.assets]
            self._note_trajectory(fact, source.stop_reason, source.provenance, names, location)
        elif isinstance(fact, BatchFormed) and isinstance(source, Manifest):
            self._note_batch(fact, location, _members_of(source))
        else:
            self._note(fact)

    # The index ------------------------------------------------------------------------------------------------

    def _note(self, record: AnyRecord) -> None:
        match record:
            case GroupAdmitted() if not record.evaluation:
                self.groups[record.run, record.group] = GroupAt(record.task, len(record.members), {})
            case GroupRetired():
                self.groups.pop((record.run, record.group), None)
            case BatchAcked():
                self.batches.pop(record.batch, None)
                made = str(record.version) if record.version is not None else ""
                self._rows.append(batch_settled(record.batch, "acked", made))
            case BatchDissolved():
                self.batches.pop(record.batch, None)
                self._rows.append(batch_settled(record.batch, "dissolved"))
            case _:
                pass  # of no concern to batches or listings

    def _note_trajectory(
        self,
        outcome: EpisodeEnded,
        stop_reason: StopReason,
        provenance: Provenance,
        assets: Sequence[str],
        location: Location,
    ) -> None:
        group = self.groups.get((outcome.run, outcome.group))
        if group is not None and outcome.status in SCORED:
            group.members[outcome.trajectory] = MemberAt(outcome.episode, location)
        self.trajectories += 1
        self._rows.append(trajectory_row(outcome, stop_reason, provenance, location))
        self._unprojected_ids.setdefault(outcome.trajectory, outcome.episode)
        for name in assets:
            self._rows.append(asset_reference(name, location.file))
            self._unprojected_assets[name] = location.position

    def _note_batch(self, formed: BatchFormed, head: Location, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
        members = tuple(self.groups[formed.run, group].members[id].location for group, ids in groups for id in ids)
        self.batches[formed.batch] = BatchAt(formed.run, head, members)
        self._rows.append(batch_row(formed.batch, formed.run, str(formed.version), head))
        self._rows += [member_row(formed.run, group, head) for group, _ in groups]

    # Reading --------------------------------------------------------------------------------------------------

    def owners(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Of these ids those that stored records have, with their episodes. Raises StoreError."""
        waiting = {id: self._unprojected_ids[id] for id in trajectories if id in self._unprojected_ids}
        return self.projection.owners(trajectories) | waiting

    def record(self, run: str, group: str, trajectory: str) -> bytes:
        """A usable record of a group in flight. Raises CorruptRecord."""
        at = self.groups.get((run, group))
        member = at.members.get(trajectory) if at is not None else None
        if member is None:
            raise CorruptRecord(
                f"The record {trajectory} of group {group} was lost in the log.",
                hint="Only this record is lost. `headrace fsck` lists all damage.",
            )
        return self.log.read(member.location)

    def group_input(self, run: str, group: str, records: Iterable[bytes]) -> GroupInput:
        """What forming a batch needs to know of a group and its records."""
        at = self.groups[run, group]
        return GroupInput(group, at.task, at.expected, [(codec.decode_head(record), len(record)) for record in records])

    # Assets ---------------------------------------------------------------------------------------------------

    def referred(self, assets: Sequence[str]) -> Set[str]:
        """Of these assets those that a record refers to, one on its way to the disk included. Raises StoreError."""
        return self.projection.referred(assets) | (self._unprojected_assets.keys() & assets)

    def files_in_use(self) -> set[int]:
        """The files of the log that a group in flight or an open batch needs: they must not be deleted."""
        groups = {member.location.file for group in self.groups.values() for member in group.members.values()}
        return groups.union(*({at.head.file, *(m.file for m in at.members)} for at in self.batches.values()))

    async def files_gone(self, numbers: Sequence[int]) -> list[str]:
        """Forget what files of the log referred to, which are deleted, durably; gives the assets that may be needed by
        nobody now. Raises StoreError."""
        await self.project()
        doubtful = [name for number in numbers for name in await asyncio.to_thread(self.projection.assets_of, number)]
        self._rows += map(references_gone, numbers)
        await self.project()
        return doubtful

    # The projection -------------------------------------------------------------------------------------------

    @property
    def unprojected(self) -> int:
        """Rows that wait to be written."""
        return len(self._rows)

    def skip_projected(self) -> None:
        """Forget rows of frames that the projection has already."""
        self._take_rows()
        self._unprojected_ids.clear()
        self._unprojected_assets.clear()

    def project_now(self, cursor: int) -> None:
        """Write waiting rows, whose frames are on disk. Blocking."""
        self.projection.write(self._take_rows(), cursor)
        self._unprojected_ids.clear()
        self._unprojected_assets.clear()

    async def project(self) -> None:
        """Write waiting rows once their frames are on disk. Raises StoreError."""
        async with self._projecting:
            rows, ids = self._take_rows(), list(self._unprojected_ids)
            cursor = self.log.tail
            if rows:
                await self.log.synced()
                await asyncio.to_thread(self.projection.write, rows, cursor)
                for id in ids:
                    del self._unprojected_ids[id]
                for name, position in list(self._unprojected_assets.items()):
                    if position < cursor:
                        del self._unprojected_assets[name]

    def _take_rows(self) -> list[Statement]:
        rows, self._rows = self._rows, []
        return rows

    async def abandon(self) -> None:
        """Close both as they are: the log was not read to its end."""
        self.projection.close()
        await self.log.close()

    async def close(self) -> None:
        """Bring log and projection to disk and close them."""
        try:
            if not self.log.failure:
                await self.project()
        finally:
            try:
                await self.log.close()
            finally:
                self.projection.close()


def _formed(manifest: Manifest) -> BatchFormed:
    return BatchFormed(
        run=manifest.run,
        batch=manifest.batch,
        groups=[group.id for group in manifest.groups],
        version=manifest.version,
    )


def _frames(decided: Sequence[Decided]) -> Iterator[tuple[FrameType, bytes, Sequence[Decided]]]:
    """The frames of what was decided, with what each carries; control records in a row share theirs."""
    plain: list[AnyRecord] = []
    for entry in (*decided, None):
        if entry is not None and not isinstance(entry, (Ended, Frozen)):
            plain.append(entry)
            continue
        for start in range(0, len(plain), FACTS_A_FRAME):
            share = plain[start : start + FACTS_A_FRAME]
            yield FrameType.CONTROL, _encoder.encode(share), share
        plain = []
        if isinstance(entry, Ended):
            yield FrameType.TRAJECTORY, entry.record, [entry]
        elif isinstance(entry, Frozen):
            yield FrameType.BATCH, entry.head, [entry]


def _members_of(manifest: Manifest) -> list[tuple[str, list[str]]]:
    """The trajectories of a batch by group."""
    ids = iter(manifest.trajectories)
    return [(group.id, list(islice(ids, group.actual))) for group in manifest.groups]

"""Where the scheduler's events go: to the log, to an index of what batches are made of, to the projection.

* Control records that are decided together share frames, in the order in which they were decided.
* Everything that was decided together is encoded before anything of it is stored.
* A trajectory id belongs to one episode, stored or on its way to the disk.
* A file of the log opens with the control state as it is behind exactly the frames before it.
* Rows for the projection are written only when their frames are on disk; a disk that refuses costs none of them.
* An asset is referred to from the moment at which a record that names it is appended, until the record's file is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence, Set
from itertools import islice
from typing import NamedTuple

import msgspec

from headrace.batch.body import read_manifest
from headrace.batch.manifest import Manifest
from headrace.store.log_format import Frame, FrameType
from headrace.wire import codec
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log, Relocations
from headrace_orchestrator.buffer.projection.entries import (
    BatchEntry,
    Entry,
    FileDeleted,
    LocatedEntry,
    TrajectoryEntry,
    entries_of,
)
from headrace_orchestrator.buffer.storage_protocols import Projection
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    BatchAcked,
    BatchDissolved,
    BatchFormed,
    EpisodeEnded,
)
from headrace_orchestrator.service.storage.location_index import LocationIndex
from headrace_orchestrator.service.storage.record_events import event_of

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyEvent])

EVENTS_A_FRAME = 64
"""Control records that share a frame: enough that its header and checksums cost little, few enough to lose at once."""

EVENTS_A_STATE = 20_000
"""Events behind a control state from which on a new one is due: what a start has to take in at most, some 0.3 s."""

GROUPS_AN_EVENT = 0.5
"""Groups of a control state for which one event more may come behind it: writing it and taking it in stay in
proportion to what it saves."""


class TrajectoryWrite(NamedTuple):
    """A terminal record to be stored as its trajectory's own bytes, and what is listed of it."""

    listed: TrajectoryEntry
    record: bytes


class BatchWrite(NamedTuple):
    """A frozen batch to be stored as its head's own bytes; its trajectories by group, in the order of the body."""

    formed: BatchFormed
    head: bytes
    groups: Sequence[tuple[str, Sequence[str]]]


StoreWrite = AnyEvent | TrajectoryWrite | BatchWrite
"""What is stored: an event as it is, the others with the bytes of their frames."""


class ControlState(msgspec.Struct, frozen=True, array_like=True):
    """What a file of the log opens with: the scheduler's snapshot and the index's."""

    core: bytes
    index: bytes


class _Names:
    """What rows on their way to the projection name: episodes by the ids of their trajectories, and assets."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.assets: set[str] = set()

    def come_behind(self, earlier: _Names) -> None:
        """Take what was named before these; the first episode of an id counts."""
        self.ids |= earlier.ids
        self.assets |= earlier.assets


_state_decoder = msgspec.msgpack.Decoder(ControlState)


class Store:
    """Log, index and projection of one data directory."""

    def __init__(self, log: Log, projection: Projection) -> None:
        self.log = log
        self.projection = projection
        self.index = LocationIndex()
        self._events = 0  # since the last control state
        self._events_a_state = EVENTS_A_STATE
        self._unprojected: list[LocatedEntry] = []
        #: Of what waits for the projection; and of that what it is being told of now.
        self._unprojected_names = _Names()
        self._projecting_names = _Names()
        self._projecting = asyncio.Lock()
        log.on_moved = self._move

    # Events of commands ----------------------------------------------------------------------------------------

    def put(self, decided: Sequence[StoreWrite]) -> None:
        """Store what was decided together, in order. Raises StoreError, or whatever cannot be encoded raises; then
        nothing was stored."""
        for kind, payload, entries in list(_frames(decided)):
            location = self.log.append(kind, payload)
            for entry in entries:
                if isinstance(entry, TrajectoryWrite):
                    self.index.note_trajectory(entry.listed.outcome, location)
                    self._list(entry.listed, location)
                elif isinstance(entry, BatchWrite):
                    self.index.note_batch(entry.formed, location, entry.groups)
                    self._list(_listed(entry), location)
                else:
                    self.index.note(entry)
                    if isinstance(entry, (BatchAcked, BatchDissolved)):
                        self._list(entry, location)
        self._events += len(decided)

    def keep_state(self, core: Scheduler) -> None:
        """Go on in a new file, which opens with the control state, where it is time. To be called when everything that
        was decided is stored."""
        due = self._events >= self._events_a_state or self.log.full or self.log.incomplete
        if due and not self.log.failure:
            self.log.rotate(self.state(core))

    def end_file(self, core: Scheduler) -> None:
        """Go on in a new file. To be called when all that was decided is stored."""
        if not self.log.failure:
            self.log.rotate(self.state(core))

    @property
    def has_events(self) -> bool:
        """Whether anything came behind the last control state."""
        return self._events > 0

    @property
    def state_due(self) -> bool:
        """Whether a start has enough to take in behind the last control state."""
        return self._events >= self._events_a_state

    def state(self, core: Scheduler) -> bytes:
        """The control state now; events are counted from here on."""
        self._expect(self.index.entries())
        return _encoder.encode(ControlState(core.snapshot(), self.index.snapshot()))

    def _expect(self, groups: int) -> None:
        self._events, self._events_a_state = 0, max(EVENTS_A_STATE, int(groups * GROUPS_AN_EVENT))

    # Events of the log -----------------------------------------------------------------------------------------

    def restore(self, state: bytes, core: Scheduler, now: float) -> None:
        """Take a control state, into a core and a store that know nothing yet. Raises CorruptRecord or
        msgspec.MsgspecError, and has taken nothing."""
        found = _state_decoder.decode(state)
        index = LocationIndex()
        index.restore(found.index)
        core.restore(found.core, now)
        self.index = index
        self._expect(self.index.entries())

    def note(self, event: AnyEvent, source: TrajectoryHead | Manifest | None, location: Location) -> None:
        """Take an event of the log into the index. Raises KeyError where it builds on a lost one."""
        self._events += 1
        if isinstance(event, EpisodeEnded):
            self.index.note_trajectory(event, location)
        elif isinstance(event, BatchFormed) and isinstance(source, Manifest):
            self.index.note_batch(event, location, _members_of(source))
        else:
            self.index.note(event)

    def list_frame(
        self, events: Sequence[AnyEvent], source: TrajectoryHead | Manifest | None, location: Location
    ) -> None:
        """Have the projection told of a frame of the log."""
        for listed in entries_of(events, source):
            self._list(listed, location)

    # Reading --------------------------------------------------------------------------------------------------

    def owners(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Of these ids those that stored records have, with their episodes. Raises StoreError."""
        owners = self.projection.owners(trajectories)
        for names in (self._unprojected_names, self._projecting_names):
            owners |= {id: names.ids[id] for id in trajectories if id in names.ids}
        return owners

    # Assets ---------------------------------------------------------------------------------------------------

    def referred(self, assets: Sequence[str]) -> Set[str]:
        """Of these assets those that a record refers to, one on its way to the disk included. Raises StoreError."""
        waiting = (self._unprojected_names.assets, self._projecting_names.assets)
        return self.projection.referred(assets).union(*(names.intersection(assets) for names in waiting))

    async def files_gone(self, numbers: Sequence[int]) -> list[str]:
        """Forget what was in deleted files of the log; gives the assets that may be needed by nobody now. Raises
        StoreError."""
        await self.project()
        doubtful = [name for number in numbers for name in await asyncio.to_thread(self.projection.assets_of, number)]
        for number in numbers:
            self._list(FileDeleted(number), Location(number, 0, 0))
        await self.project()
        return doubtful

    # The projection -------------------------------------------------------------------------------------------

    @property
    def unprojected(self) -> int:
        """Frames that the projection was not told of yet."""
        return len(self._unprojected)

    def _list(self, listed: Entry, location: Location) -> None:
        self._unprojected.append(LocatedEntry(listed, location))
        if isinstance(listed, TrajectoryEntry):
            names, outcome = self._unprojected_names, listed.outcome
            names.ids.setdefault(outcome.trajectory, outcome.episode)
            if listed.assets:
                names.assets.update(listed.assets)

    def project_now(self, cursor: int) -> None:
        """Write the rows of what waits, whose frames are on disk. Blocking. Raises StoreError."""
        waiting, self._unprojected = self._unprojected, []
        self._unprojected_names = _Names()
        self.projection.write(waiting, cursor)

    async def project(self) -> None:
        """Write the rows of what waits now, once its frames are on disk. Raises StoreError."""
        async with self._projecting:
            count, cursor = len(self._unprojected), self.log.tail
            if not count:
                await asyncio.to_thread(self.projection.trim)
                return
            # Names are let go all at once: one by one they would hold the event loop as long as their rows the thread.
            self._projecting_names, self._unprojected_names = self._unprojected_names, _Names()
            try:
                await self.log.synced()
                await asyncio.to_thread(self._write, self._unprojected[:count], cursor)
                del self._unprojected[:count]
            except BaseException:
                self._unprojected_names.come_behind(self._projecting_names)
                raise
            finally:
                self._projecting_names = _Names()

    def _write(self, waiting: Sequence[LocatedEntry], cursor: int) -> None:
        self.projection.write(waiting, cursor)
        self.projection.trim()

    def _move(self, moves: Relocations) -> None:
        """Frames were stored elsewhere than was meant, and nobody was told yet where they are."""
        self.index.move(moves)
        self._unprojected = [
            LocatedEntry(listed, moves.get(location.position, location)) for listed, location in self._unprojected
        ]

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


def events_of(frame: Frame) -> tuple[list[AnyEvent], TrajectoryHead | Manifest | None]:
    """The events that a frame carries, and what one is read from that has a frame of its own. Raises ValueError,
    MsgspecError or a HeadraceError."""
    if frame.type is FrameType.TRAJECTORY:
        head = codec.decode_head(frame.payload)
        return [event_of(head, len(frame.payload))], head
    if frame.type is FrameType.BATCH:
        manifest = read_manifest(frame.payload)
        return [_formed(manifest)], manifest
    return _decoder.decode(frame.payload), None


def _listed(entry: BatchWrite) -> BatchEntry:
    formed = entry.formed
    return BatchEntry(formed.batch, formed.run, str(formed.version), tuple(group for group, _ in entry.groups))


def _formed(manifest: Manifest) -> BatchFormed:
    return BatchFormed(
        run=manifest.run,
        batch=manifest.batch,
        groups=[group.id for group in manifest.groups],
        version=manifest.version,
        filtered=manifest.selection.filtered,
    )


def _frames(decided: Sequence[StoreWrite]) -> Iterator[tuple[FrameType, bytes, Sequence[StoreWrite]]]:
    """The frames of what was decided, with what each carries; events in a row share theirs."""
    plain: list[AnyEvent] = []
    for entry in (*decided, None):
        if entry is not None and not isinstance(entry, (TrajectoryWrite, BatchWrite)):
            plain.append(entry)
            continue
        for start in range(0, len(plain), EVENTS_A_FRAME):
            share = plain[start : start + EVENTS_A_FRAME]
            yield FrameType.CONTROL, _encoder.encode(share), share
        plain = []
        if isinstance(entry, TrajectoryWrite):
            yield FrameType.TRAJECTORY, entry.record, [entry]
        elif isinstance(entry, BatchWrite):
            yield FrameType.BATCH, entry.head, [entry]


def _members_of(manifest: Manifest) -> list[tuple[str, list[str]]]:
    """The trajectories of a batch by group."""
    ids = iter(manifest.trajectories)
    return [(group.id, list(islice(ids, group.actual))) for group in manifest.groups]

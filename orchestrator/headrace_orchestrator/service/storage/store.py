"""The store: the scheduler's events go to the log, to the index of locations, and to the projection.

* All events of a commit are encoded before any is stored.
* A trajectory id belongs to one episode, stored or on its way to the disk.
* The next file of the log opens with the current control state, behind exactly the frames before it.
* Rows of the projection are written only when their frames are on disk; a failing disk loses none of them.
* An asset counts as referenced from the moment a record that names it is appended, until the record's file is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from itertools import islice

import msgspec

from headrace.batch.manifest import Manifest
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log, Relocations
from headrace_orchestrator.buffer.projection.entries import (
    FileDeleted,
    LocatedEntry,
    ProjectedTrajectory,
    ProjectionEntry,
    entries_of,
)
from headrace_orchestrator.buffer.projection.protocol import Projection
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import AnyEvent, BatchAcked, BatchDissolved, BatchFormed, EpisodeEnded
from headrace_orchestrator.service.storage.frames import BatchWrite, TrajectoryWrite, Write, frames_of
from headrace_orchestrator.service.storage.location_index import LocationIndex

EVENTS_PER_STATE = 20_000
"""Events behind a control state after which a new state is due: the most that a start replays, some 0.3 s."""

EVENTS_PER_GROUP = 0.5
"""Events for each group of a control state, if that is more than ``EVENTS_PER_STATE``: the cost of writing and reading
the state stays in proportion to the replay that it saves."""


class ControlState(msgspec.Struct, frozen=True, array_like=True):
    """The state that a file of the log opens with: the scheduler's snapshot and the index's."""

    core: bytes
    index: bytes


_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(ControlState)


class _PendingNames:
    """Names in entries that are on their way to the projection: episodes by trajectory id, and assets."""

    def __init__(self) -> None:
        self.episodes: dict[str, str] = {}
        self.assets: set[str] = set()

    def prepend(self, earlier: _PendingNames) -> None:
        """Add names of earlier entries; the first episode of an id counts."""
        self.episodes |= earlier.episodes
        self.assets |= earlier.assets


class Store:
    """Log, index and projection of one data directory."""

    def __init__(self, log: Log, projection: Projection) -> None:
        self.log = log
        self.projection = projection
        self.index = LocationIndex()
        self._events = 0  # since the last control state
        self._events_per_state = EVENTS_PER_STATE
        self._unprojected: list[LocatedEntry] = []
        #: Names in the entries that wait, and in those that are being written now.
        self._waiting_names = _PendingNames()
        self._projecting_names = _PendingNames()
        self._projecting = asyncio.Lock()
        log.on_relocated = self._relocate

    # Writing --------------------------------------------------------------------------------------------------

    def append(self, writes: Sequence[Write]) -> None:
        """Append writes that were decided together, in order. Raises StoreError, or the error of a write that cannot be
        encoded; then nothing was appended."""
        for kind, payload, carried in list(frames_of(writes)):
            location = self.log.append(kind, payload)
            for write in carried:
                if isinstance(write, TrajectoryWrite):
                    self.index.add_trajectory(write.entry.event, location)
                    self._add_entry(write.entry, location)
                elif isinstance(write, BatchWrite):
                    self.index.add_batch(write.event, location, write.groups)
                    self._add_entry(write.entry, location)
                else:
                    self.index.apply(write)
                    if isinstance(write, (BatchAcked, BatchDissolved)):
                        self._add_entry(write, location)
        self._events += len(writes)

    def rotate_if_due(self, core: Scheduler) -> None:
        """Open a new file of the log with the control state, if it is time. All decisions must have been appended."""
        if self.state_due or self.log.full or self.log.needs_state:
            self.rotate(core)

    def rotate(self, core: Scheduler) -> None:
        """Open a new file of the log, unless the disk fails. All decisions must have been appended."""
        if not self.log.failure:
            self.log.rotate(self.state(core))

    @property
    def has_events(self) -> bool:
        """True if any event came after the last control state."""
        return self._events > 0

    @property
    def state_due(self) -> bool:
        """True if a new control state is due, because a start would replay too many events."""
        return self._events >= self._events_per_state

    def state(self, core: Scheduler) -> bytes:
        """The control state now; events are counted from here on."""
        self._restart_count()
        return _encoder.encode(ControlState(core.snapshot(), self.index.snapshot()))

    def _restart_count(self) -> None:
        self._events, self._events_per_state = (
            0,
            max(EVENTS_PER_STATE, int(self.index.group_count() * EVENTS_PER_GROUP)),
        )

    # Replay ---------------------------------------------------------------------------------------------------

    def restore(self, state: bytes, core: Scheduler, now: float) -> None:
        """Restore a control state into an empty core and store. Raises CorruptRecord or msgspec.MsgspecError, and then
        has changed nothing."""
        stored = _state_decoder.decode(state)
        index = LocationIndex()
        index.restore(stored.index)
        core.restore(stored.core, now)
        self.index = index
        self._restart_count()

    def replay(self, event: AnyEvent, source: TrajectoryHead | Manifest | None, location: Location) -> None:
        """Apply an event of the log to the index. Raises KeyError if it builds on a lost one."""
        self._events += 1
        if isinstance(event, EpisodeEnded):
            self.index.add_trajectory(event, location)
        elif isinstance(event, BatchFormed) and isinstance(source, Manifest):
            self.index.add_batch(event, location, _members_of(source))
        else:
            self.index.apply(event)

    def add_entries(
        self, events: Sequence[AnyEvent], source: TrajectoryHead | Manifest | None, location: Location
    ) -> None:
        """Queue the entries of a frame of the log for the projection."""
        for entry in entries_of(events, source):
            self._add_entry(entry, location)

    # Lookups --------------------------------------------------------------------------------------------------

    def episodes_of(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Episodes of the given trajectories by id, without unknown ones. Raises StoreError."""
        episodes = self.projection.episodes_of(trajectories)
        for names in (self._waiting_names, self._projecting_names):
            episodes |= {id: names.episodes[id] for id in trajectories if id in names.episodes}
        return episodes

    def referenced(self, assets: Sequence[str]) -> Set[str]:
        """The given assets that a record refers to, stored or on its way to the disk. Raises StoreError."""
        waiting = (self._waiting_names.assets, self._projecting_names.assets)
        return self.projection.referenced(assets).union(*(names.intersection(assets) for names in waiting))

    async def forget_files(self, numbers: Sequence[int]) -> list[str]:
        """Remove the entries of deleted files; returns the assets that may be unreferenced now. Raises StoreError."""
        await self.project()
        candidates = [name for number in numbers for name in await asyncio.to_thread(self.projection.assets_of, number)]
        for number in numbers:
            self._add_entry(FileDeleted(number), Location(number, 0, 0))
        await self.project()
        return candidates

    # The projection -------------------------------------------------------------------------------------------

    @property
    def unprojected(self) -> int:
        """Number of entries that wait for the projection."""
        return len(self._unprojected)

    def _add_entry(self, entry: ProjectionEntry, location: Location) -> None:
        self._unprojected.append(LocatedEntry(entry, location))
        if isinstance(entry, ProjectedTrajectory):
            names, event = self._waiting_names, entry.event
            names.episodes.setdefault(event.trajectory, event.episode)
            if entry.assets:
                names.assets.update(entry.assets)

    def project_blocking(self, cursor: int) -> None:
        """Write the waiting entries, whose frames must be on disk. Raises StoreError."""
        entries, self._unprojected = self._unprojected, []
        self._waiting_names = _PendingNames()
        self.projection.write(entries, cursor)

    async def project(self) -> None:
        """Write the entries that wait now, once their frames are on disk. Raises StoreError."""
        async with self._projecting:
            count, cursor = len(self._unprojected), self.log.tail
            if not count:
                await asyncio.to_thread(self.projection.trim)
                return
            # Names are dropped all at once: one by one they would hold the event loop as long as their rows the thread.
            self._projecting_names, self._waiting_names = self._waiting_names, _PendingNames()
            try:
                await self.log.synced()
                await asyncio.to_thread(self._write, self._unprojected[:count], cursor)
                del self._unprojected[:count]
            except BaseException:
                self._waiting_names.prepend(self._projecting_names)
                raise
            finally:
                self._projecting_names = _PendingNames()

    def _write(self, entries: Sequence[LocatedEntry], cursor: int) -> None:
        self.projection.write(entries, cursor)
        self.projection.trim()

    def _relocate(self, relocations: Relocations) -> None:
        """Frames were stored elsewhere than planned, before their location was used outside this store."""
        self.index.relocate(relocations)
        self._unprojected = [
            LocatedEntry(entry, relocations.get(location.position, location)) for entry, location in self._unprojected
        ]

    # Closing --------------------------------------------------------------------------------------------------

    async def abandon(self) -> None:
        """Close log and projection as they are: the log was not read to its end."""
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


def _members_of(manifest: Manifest) -> list[tuple[str, list[str]]]:
    """The trajectories of a batch by group."""
    ids = iter(manifest.trajectories)
    return [(group.id, list(islice(ids, group.actual))) for group in manifest.groups]

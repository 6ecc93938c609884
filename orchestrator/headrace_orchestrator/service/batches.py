"""Batches: formed once, served as the same bytes ever after.

* A batch is frozen when it is formed: members, order, columns, and so every byte of its body.
* A record that is damaged is left out when a batch is formed, and named; a group of which nothing is left is lost.
* A body is read whole before its first byte is sent, if it fits; a larger one is streamed.
* A body is streamed on when a disk that refused takes its records in another file.
* A body is held and sent as the pieces that it was read in; no copy joins them.
* A shard is a view of the frozen body: its rows' columns, and the records that they are in.
* Nothing here blocks the event loop: what is read and computed is in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace.batch.body import read_head, read_manifest
from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.batch.shards import ShardedBatch
from headrace.errors import CorruptRecord
from headrace.runspec import RunSpec
from headrace.server import logs
from headrace.wire.codec import decode_head
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Redeliver
from headrace_orchestrator.service.storage.location_index import BatchLocations
from headrace_orchestrator.service.storage.store import Store

_log = logs.logger(__name__)

WHOLE_BODY_BYTES = 64 << 20
"""Bodies up to this are read before they are sent, so that damage is still an error answer."""

CHUNK_BYTES = 4 << 20
"""Larger bodies are read and sent in pieces of this size: big enough for the disk, small enough for memory."""


BodyParts = tuple[bytes | memoryview, ...]
"""Bytes in pieces, in order."""


@dataclass(frozen=True)
class ServedBatch:
    """A batch on its way to a learner."""

    batch: str
    generation: int
    lease_s: float
    size_bytes: int
    body: AsyncIterator[BodyParts]


@dataclass(frozen=True)
class BuiltBatch:
    """A batch that can be frozen: its plan without damaged records, its head, and its body (head and records), empty
    where that is too long to be held. ``lost``: groups left out; ``damaged`` records were."""

    plan: Form
    head: bytes
    body: BodyParts
    trajectories: int
    lost: Sequence[str]
    damaged: int

    @property
    def staleness(self) -> int:
        """Of the oldest row."""
        return read_manifest(self.head).staleness_max


@dataclass(frozen=True)
class _Long:
    """A body that is too long to be held: its head, and the numbers of its records among those of the batch; ``at`` is
    where these were."""

    batch: str
    at: BatchLocations
    head: bytes
    records: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(self.at.members[n].length for n in self.records)


class PlannedGroup(NamedTuple):
    """A group of a planned batch as the index has it: its size at admission, and where its records are, None where
    they were lost."""

    id: str
    expected: int
    members: dict[str, Location | None]


def planned_groups(store: Store, run: str, plan: Form) -> list[PlannedGroup]:
    """Where the records of a planned batch are."""
    known = store.index.groups.get(run, {})
    found = []
    for group, trajectories in plan.groups:
        at = known.get(group)
        places = {} if at is None else dict(at)
        found.append(PlannedGroup(group, 0 if at is None else at.expected, {id: places.get(id) for id in trajectories}))
    return found


def build_batch(log: Log, plan: Form, groups: Sequence[PlannedGroup], spec: RunSpec) -> BuiltBatch:
    """Read the members' records and compute the head. Blocking."""
    whole: list[tuple[str, list[str]]] = []
    inputs: list[GroupInput] = []
    records: list[bytes] = []
    for group in groups:
        sound = _read_group(log, group)
        if sound:
            members = [(decode_head(record), len(record)) for record in sound.values()]
            whole.append((group.id, list(sound)))
            inputs.append(GroupInput(group.id, members[0][0].task, group.expected, members))
            records += sound.values()
    head = build_head(
        batch=plan.batch,
        run=spec.name,
        estimator=spec.estimator,
        version=plan.version,
        groups=inputs,
        selection=plan.selection,
        bin_tokens=spec.bin_tokens or 0,
    )
    left = {group for group, _ in whole}
    lost = [group.id for group in groups if group.id not in left]
    damaged = sum(len(trajectories) for _, trajectories in plan.groups) - len(records)
    body = (head, *records)
    held = body if _size(body) <= WHOLE_BODY_BYTES else ()
    return BuiltBatch(msgspec.structs.replace(plan, groups=whole), head, held, len(records), lost, damaged)


def _size(parts: BodyParts) -> int:
    return sum(map(len, parts))


async def _at_once(body: BodyParts) -> AsyncIterator[BodyParts]:
    yield body


def _read_group(log: Log, group: PlannedGroup) -> dict[str, bytes]:
    """The records of a group by id, damaged ones left out."""
    sound: dict[str, bytes] = {}
    for trajectory, location in group.members.items():
        try:
            if location is None:
                raise CorruptRecord("It was lost in the log.")
            sound[trajectory] = log.read(location)
        except CorruptRecord as error:
            _log.error("damaged record left out of a batch", group=group.id, trajectory=trajectory, detail=error.detail)
    return sound


class BatchBodies:
    """Reads the bodies of frozen batches; keeps the newest small one, which is what a repeated pull and the other
    ranks of a learner ask for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: tuple[str, BodyParts] = ("", ())
        self._cut: tuple[str, int, ShardedBatch] | None = None
        self._one = asyncio.Lock()

    def keep(self, batch: str, body: BodyParts) -> None:
        """A body that was just made; an empty one is too long to be kept."""
        if body:
            self._newest = (batch, body)

    def forget(self, batch: str) -> None:
        """A body that is not served any more."""
        if self._newest[0] == batch:
            self._newest = ("", ())

    async def serve(self, lease: Redeliver, damaged: Callable[[CorruptRecord], None]) -> ServedBatch:
        """A batch, or a shard of it, on its lease. Raises CorruptRecord where its bytes are damaged; ``damaged`` is
        called where that shows only when a part of it is under way."""
        while True:
            at = self._store.index.batches.get(lease.batch)
            try:
                return await self._serve(lease, at, damaged)
            except CorruptRecord:
                if self._store.index.batches.get(lease.batch) == at:
                    raise
                # It was moved to another file while it was read.

    async def _serve(
        self, lease: Redeliver, at: BatchLocations | None, damaged: Callable[[CorruptRecord], None]
    ) -> ServedBatch:
        if at is None:
            raise CorruptRecord(
                f"Batch {lease.batch} cannot be served again: a record that it needs was lost in the log.",
                hint="Pull again; `headrace fsck` lists all damage.",
            )
        name, newest = self._newest
        if name == lease.batch and lease.shards == 1:
            return ServedBatch(lease.batch, lease.generation, lease.lease_s, _size(newest), _at_once(newest))
        async with self._one:  # the ranks of a learner come together, and want the same file read once
            made = await asyncio.to_thread(self._make, lease, at)
        if isinstance(made, tuple):
            return ServedBatch(lease.batch, lease.generation, lease.lease_s, _size(made), _at_once(made))
        parts = self._watched(self._stream(made), damaged)
        return ServedBatch(lease.batch, lease.generation, lease.lease_s, made.size_bytes, parts)

    def _make(self, lease: Redeliver, at: BatchLocations) -> BodyParts | _Long:
        """The body, or where it is. Blocking."""
        whole = self._whole(lease.batch, at)
        if lease.shards == 1:
            if whole is not None:
                return whole
            return _Long(lease.batch, at, self._store.log.read(at.head), range(len(at.members)))
        cut = self._sharding(lease, at, whole).shard(lease.shard)
        records = cut.records.tolist()
        if whole is not None:
            return (cut.head, *(whole[1 + n] for n in records))
        long = _Long(lease.batch, at, cut.head, records)
        if long.size_bytes > WHOLE_BODY_BYTES:
            return long
        return (cut.head, *self._read(at, records))

    def _whole(self, batch: str, at: BatchLocations) -> BodyParts | None:
        """The whole body, head and records, if it fits."""
        name, body = self._newest
        if name == batch:
            return body
        if at.size_bytes > WHOLE_BODY_BYTES:
            return None
        body = tuple(map(self._store.log.read, (at.head, *at.members)))
        self._newest = (batch, body)
        return body

    def _sharding(self, lease: Redeliver, at: BatchLocations, whole: BodyParts | None) -> ShardedBatch:
        if self._cut is not None and self._cut[:2] == (lease.batch, lease.shards):
            return self._cut[2]
        head = self._store.log.read(at.head) if whole is None else whole[0]
        sharding = ShardedBatch(read_head(head), lease.shards)
        self._cut = (lease.batch, lease.shards, sharding)
        return sharding

    async def _watched(
        self, body: AsyncIterator[BodyParts], damaged: Callable[[CorruptRecord], None]
    ) -> AsyncIterator[BodyParts]:
        try:
            async for parts in body:
                yield parts
        except CorruptRecord as error:
            damaged(error)
            raise

    async def _stream(self, body: _Long) -> AsyncIterator[BodyParts]:
        yield (body.head,)
        piece: list[int] = []
        size = 0
        for number in body.records:
            piece.append(number)
            size += body.at.members[number].length
            if size >= CHUNK_BYTES:
                yield await self._piece(body, piece)
                piece, size = [], 0
        if piece:
            yield await self._piece(body, piece)

    async def _piece(self, body: _Long, records: Sequence[int]) -> BodyParts:
        """Records of a body, from where they are now: a disk that refused may have taken them in another file."""
        while True:
            at = self._where(body)
            try:
                return await asyncio.to_thread(self._read, at, records)
            except CorruptRecord:
                if self._where(body) == at:
                    raise

    def _where(self, body: _Long) -> BatchLocations:
        """Where the batch is, or was when it was given up."""
        return self._store.index.batches.get(body.batch, body.at)

    def _read(self, at: BatchLocations, records: Sequence[int]) -> BodyParts:
        return tuple(self._store.log.read(at.members[n]) for n in records)

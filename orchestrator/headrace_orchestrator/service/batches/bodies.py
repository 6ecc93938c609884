"""Bodies of frozen batches, as they are served.

* A batch is the same bytes at every pull, also after a restart: members, order and columns are frozen.
* A larger body is streamed and is the same; a small one is read whole before its first byte is sent.
* Streaming continues if a failing disk moves the records to another file.
* A body is kept and sent as the parts that it was read in, without a copy that joins them.
* A shard is a view of the frozen body: the columns of its rows, and the records that they are in.

Reading and computing happen in a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from headrace.batch.body import read_head
from headrace.batch.shards import ShardedBatch
from headrace.errors import CorruptRecord
from headrace_orchestrator.scheduler.commands.pull_plan import Redeliver
from headrace_orchestrator.service.storage.location_index import BatchLocations
from headrace_orchestrator.service.storage.store import Store

SMALL_BODY_BYTES = 64 << 20
"""Bodies up to this size are read whole before they are sent, so that damage still becomes an error response."""

CHUNK_BYTES = 4 << 20
"""Size of the chunks in which larger bodies are read and sent: large enough for the disk, small enough for memory."""


BatchBody = tuple[bytes | memoryview, ...]
"""Consecutive parts of a body."""


def is_small(size_bytes: int) -> bool:
    """True if a body of this size is read and kept whole."""
    return size_bytes <= SMALL_BODY_BYTES


@dataclass(frozen=True)
class ServedBatch:
    """A batch on its way to a learner."""

    batch: str
    generation: int
    lease_s: float
    size_bytes: int
    body: AsyncIterator[BatchBody]


@dataclass(frozen=True)
class _LargeBody:
    """A body that is streamed: its head, and the numbers of its records among those of the batch, whose locations were
    ``locations`` at the start."""

    batch: str
    locations: BatchLocations
    head: bytes
    records: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(self.locations.members[n].length for n in self.records)


class BatchBodies:
    """Reads the bodies of frozen batches; keeps the newest small one, because repeated pulls and the other ranks of a
    learner need it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: tuple[str, BatchBody] = ("", ())
        self._sharded: tuple[str, int, ShardedBatch] | None = None
        self._read_lock = asyncio.Lock()

    def keep(self, batch: str, body: BatchBody) -> None:
        """Keep a body that was just built, unless it is empty because of its size."""
        if body:
            self._newest = (batch, body)

    def forget(self, batch: str) -> None:
        """Drop a body that is not served any more."""
        if self._newest[0] == batch:
            self._newest = ("", ())

    async def serve(self, lease: Redeliver, on_damage: Callable[[CorruptRecord], None]) -> ServedBatch:
        """A leased batch, or its leased shard. Raises CorruptRecord if its bytes are damaged; ``on_damage`` is called
        if that is noticed only after a part of the body was sent."""
        while True:
            locations = self._store.index.batches.get(lease.batch)
            try:
                return await self._serve(lease, locations, on_damage)
            except CorruptRecord:
                if self._store.index.batches.get(lease.batch) == locations:
                    raise
                # The records were moved to another file while they were read.

    async def _serve(
        self, lease: Redeliver, locations: BatchLocations | None, on_damage: Callable[[CorruptRecord], None]
    ) -> ServedBatch:
        if locations is None:
            raise CorruptRecord(
                f"Batch {lease.batch} cannot be served again: a record that it needs was lost in the log.",
                hint="Pull again; `headrace fsck` lists all damage.",
            )
        batch, newest = self._newest
        if batch == lease.batch and lease.shards == 1:
            return _served(lease, newest)
        async with self._read_lock:  # the ranks of a learner come together, and need the same file read once
            body = await asyncio.to_thread(self._prepare, lease, locations)
        if isinstance(body, tuple):
            return _served(lease, body)
        parts = _reporting_damage(self._stream(body), on_damage)
        return ServedBatch(lease.batch, lease.generation, lease.lease_s, body.size_bytes, parts)

    def _prepare(self, lease: Redeliver, locations: BatchLocations) -> BatchBody | _LargeBody:
        """The body if it is small, or a description for ``_stream``. Blocking."""
        whole = self._read_small(lease.batch, locations)
        if lease.shards == 1:
            if whole is not None:
                return whole
            head = self._store.log.read(locations.head)
            return _LargeBody(lease.batch, locations, head, range(len(locations.members)))
        shard = self._sharded_batch(lease, locations, whole).shard(lease.shard)
        records = shard.records.tolist()
        if whole is not None:
            return (shard.head, *(whole[1 + n] for n in records))
        large = _LargeBody(lease.batch, locations, shard.head, records)
        return (shard.head, *self._read(locations, records)) if is_small(large.size_bytes) else large

    def _read_small(self, batch: str, locations: BatchLocations) -> BatchBody | None:
        """The whole body, head and records, if it is small."""
        newest, body = self._newest
        if newest == batch:
            return body
        if not is_small(locations.size_bytes):
            return None
        body = tuple(map(self._store.log.read, (locations.head, *locations.members)))
        self._newest = (batch, body)
        return body

    def _sharded_batch(self, lease: Redeliver, locations: BatchLocations, whole: BatchBody | None) -> ShardedBatch:
        if self._sharded is not None and self._sharded[:2] == (lease.batch, lease.shards):
            return self._sharded[2]
        head = self._store.log.read(locations.head) if whole is None else whole[0]
        sharded = ShardedBatch(read_head(head), lease.shards)
        self._sharded = (lease.batch, lease.shards, sharded)
        return sharded

    async def _stream(self, body: _LargeBody) -> AsyncIterator[BatchBody]:
        yield (body.head,)
        chunk: list[int] = []
        size_bytes = 0
        for number in body.records:
            chunk.append(number)
            size_bytes += body.locations.members[number].length
            if size_bytes >= CHUNK_BYTES:
                yield await self._read_chunk(body, chunk)
                chunk, size_bytes = [], 0
        if chunk:
            yield await self._read_chunk(body, chunk)

    async def _read_chunk(self, body: _LargeBody, records: Sequence[int]) -> BatchBody:
        """Records of a body, read from their current locations: a failing disk may have moved them."""
        while True:
            locations = self._current_locations(body)
            try:
                return await asyncio.to_thread(self._read, locations, records)
            except CorruptRecord:
                if self._current_locations(body) == locations:
                    raise

    def _current_locations(self, body: _LargeBody) -> BatchLocations:
        """The locations of the batch now, or the first ones if the batch was dissolved or acked meanwhile."""
        return self._store.index.batches.get(body.batch, body.locations)

    def _read(self, locations: BatchLocations, records: Sequence[int]) -> BatchBody:
        return tuple(self._store.log.read(locations.members[n]) for n in records)


def _served(lease: Redeliver, body: BatchBody) -> ServedBatch:
    async def whole() -> AsyncIterator[BatchBody]:
        yield body

    return ServedBatch(lease.batch, lease.generation, lease.lease_s, sum(map(len, body)), whole())


async def _reporting_damage(
    body: AsyncIterator[BatchBody], on_damage: Callable[[CorruptRecord], None]
) -> AsyncIterator[BatchBody]:
    try:
        async for parts in body:
            yield parts
    except CorruptRecord as error:
        on_damage(error)
        raise

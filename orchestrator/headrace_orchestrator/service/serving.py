"""Batches: formed once, served as the same bytes ever after.

* A batch is frozen when it is formed: members, order, columns, and so every byte of its body.
* A record that is damaged is left out when a batch is formed, and named; a group of which nothing is left is lost.
* A body is read whole before its first byte is sent, if it fits; a larger one is streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from headrace.batch import build_head, read_manifest
from headrace.errors import CorruptRecord
from headrace.runspec import RunSpec
from headrace.strands import GroupInput
from headrace.trajectory import Version
from headrace_orchestrator import logs
from headrace_orchestrator.buffer.log import Location
from headrace_orchestrator.scheduler.core import Form, Redeliver
from headrace_orchestrator.service.index import BatchAt
from headrace_orchestrator.service.store import Store

log = logs.logger(__name__)

WHOLE_BODY_BYTES = 64 << 20
"""Bodies up to this are read before they are sent, so that damage is still an error answer; it is memory for each."""

CHUNK_BYTES = 4 << 20
"""Larger bodies are read and sent in pieces of this size: big enough for the disk, small enough for memory."""


@dataclass(frozen=True)
class Served:
    """A batch on its way to a learner."""

    batch: str
    generation: int
    lease_s: float
    size_bytes: int
    body: bytes | AsyncIterator[bytes]


@dataclass(frozen=True)
class Formed:
    """A batch that can be frozen: its plan without damaged records, its head, its body. ``lost``: groups left out;
    ``damaged`` records were."""

    plan: Form
    head: bytes
    records: Sequence[bytes]
    lost: Sequence[str]
    damaged: int

    @property
    def staleness(self) -> int:
        """Of the oldest row."""
        return read_manifest(self.head).staleness_max


def compose(store: Store, plan: Form, spec: RunSpec, version: Version) -> Formed:
    """Read the members' records and compute the head."""
    groups: list[tuple[str, list[str]]] = []
    inputs: list[GroupInput] = []
    records: list[bytes] = []
    for group, trajectories in plan.groups:
        sound = _read_group(store, spec.name, group, trajectories)
        if sound:
            groups.append((group, list(sound)))
            inputs.append(store.group_input(spec.name, group, sound.values()))
            records += sound.values()
    head = build_head(
        batch=plan.batch,
        run=spec.name,
        estimator=spec.estimator,
        version=version,
        groups=inputs,
        selection=plan.selection,
    )
    whole = {group for group, _ in groups}
    lost = [group for group, _ in plan.groups if group not in whole]
    damaged = sum(len(trajectories) for _, trajectories in plan.groups) - len(records)
    return Formed(Form(plan.batch, groups, plan.selection), head, records, lost, damaged)


def _read_group(store: Store, run: str, group: str, trajectories: list[str]) -> dict[str, bytes]:
    """The records of a group by id, damaged ones left out."""
    sound: dict[str, bytes] = {}
    for trajectory in trajectories:
        try:
            sound[trajectory] = store.record(run, group, trajectory)
        except CorruptRecord as error:
            log.error("damaged record left out of a batch", group=group, trajectory=trajectory, detail=error.detail)
    return sound


class Bodies:
    """Reads the bodies of frozen batches; keeps the newest small one, which is what a repeated pull asks for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: tuple[str, bytes] = ("", b"")

    def keep(self, batch: str, parts: Sequence[bytes]) -> None:
        """A body that was just made."""
        if sum(map(len, parts)) <= WHOLE_BODY_BYTES:
            self._newest = (batch, b"".join(parts))

    def forget(self, batch: str) -> None:
        """A body that is not served any more."""
        if self._newest[0] == batch:
            self._newest = ("", b"")

    async def serve(self, lease: Redeliver, damaged: Callable[[CorruptRecord], None]) -> Served:
        """A batch on its lease. Raises CorruptRecord where its bytes are damaged; ``damaged`` is called where that
        shows only when a part of it is under way."""
        at = self._store.index.batches.get(lease.batch)
        if at is None:
            raise CorruptRecord(
                f"Batch {lease.batch} cannot be served again: a record that it needs was lost in the log.",
                hint="Pull again; `headrace fsck` lists all damage.",
            )
        body = await self._body(lease.batch, at, damaged)
        return Served(lease.batch, lease.generation, lease.lease_s, at.size_bytes, body)

    async def _body(
        self, batch: str, at: BatchAt, damaged: Callable[[CorruptRecord], None]
    ) -> bytes | AsyncIterator[bytes]:
        name, body = self._newest
        if name == batch:
            return body
        if at.size_bytes > WHOLE_BODY_BYTES:
            return self._watched(self._stream(at), damaged)
        body = await asyncio.to_thread(self._read, (at.head, *at.members))
        self._newest = (batch, body)
        return body

    async def _watched(
        self, parts: AsyncIterator[bytes], damaged: Callable[[CorruptRecord], None]
    ) -> AsyncIterator[bytes]:
        try:
            async for part in parts:
                yield part
        except CorruptRecord as error:
            damaged(error)
            raise

    async def _stream(self, at: BatchAt) -> AsyncIterator[bytes]:
        piece: list[Location] = []
        size = 0
        for location in (at.head, *at.members):
            piece.append(location)
            size += location.length
            if size >= CHUNK_BYTES:
                yield await asyncio.to_thread(self._read, piece)
                piece, size = [], 0
        if piece:
            yield await asyncio.to_thread(self._read, piece)

    def _read(self, locations: Sequence[Location]) -> bytes:
        return b"".join(map(self._store.log.read, locations))

"""Frames of the log, from and to the scheduler's events.

* Events of one commit share frames in their order.
* An event that has a record or a batch head of its own is stored as those bytes, and read back from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.batch.body import read_manifest
from headrace.batch.manifest import Manifest
from headrace.store.log_format import Frame, FrameType
from headrace.wire import codec
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.projection.entries import ProjectedBatch, ProjectedTrajectory
from headrace_orchestrator.scheduler.events import AnyEvent, BatchFormed
from headrace_orchestrator.service.storage.record_events import event_of

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyEvent])

EVENTS_PER_FRAME = 64
"""Maximum number of events in a frame: enough to make its header and checksums cheap, few enough to lose at once."""


class TrajectoryWrite(NamedTuple):
    """A terminal record to store, and its entry in the projection."""

    entry: ProjectedTrajectory
    record: bytes


class BatchWrite(NamedTuple):
    """A frozen batch to store as its head; its trajectories by group, in the order of the body."""

    event: BatchFormed
    head: bytes
    groups: Sequence[tuple[str, Sequence[str]]]

    @property
    def entry(self) -> ProjectedBatch:
        event = self.event
        return ProjectedBatch(event.batch, event.run, str(event.version), tuple(group for group, _ in self.groups))


Write = AnyEvent | TrajectoryWrite | BatchWrite
"""Anything that is stored: an event as it is, or with the bytes of a frame of its own."""


def frames_of(writes: Sequence[Write]) -> Iterator[tuple[FrameType, bytes, Sequence[Write]]]:
    """The frames of some writes, with the writes that each one carries; consecutive events share frames."""
    events: list[AnyEvent] = []
    for write in (*writes, None):
        if write is not None and not isinstance(write, (TrajectoryWrite, BatchWrite)):
            events.append(write)
            continue
        for start in range(0, len(events), EVENTS_PER_FRAME):
            share = events[start : start + EVENTS_PER_FRAME]
            yield FrameType.CONTROL, _encoder.encode(share), share
        events = []
        if isinstance(write, TrajectoryWrite):
            yield FrameType.TRAJECTORY, write.record, [write]
        elif isinstance(write, BatchWrite):
            yield FrameType.BATCH, write.head, [write]


def events_of(frame: Frame) -> tuple[list[AnyEvent], TrajectoryHead | Manifest | None]:
    """The events of a frame, and the record's head or batch's manifest that is its payload, if any. Raises ValueError,
    MsgspecError or a HeadraceError."""
    if frame.type is FrameType.TRAJECTORY:
        head = codec.decode_head(frame.payload)
        return [event_of(head, len(frame.payload))], head
    if frame.type is FrameType.BATCH:
        manifest = read_manifest(frame.payload)
        return [_batch_formed(manifest)], manifest
    return _decoder.decode(frame.payload), None


def _batch_formed(manifest: Manifest) -> BatchFormed:
    return BatchFormed(
        run=manifest.run,
        batch=manifest.batch,
        groups=[group.id for group in manifest.groups],
        version=manifest.version,
        filtered=manifest.selection.filtered,
    )

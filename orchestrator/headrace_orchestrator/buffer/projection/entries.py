"""What the projection is told of a frame, and what it tells of a record.

* A frame's rows follow from the frame alone: a rebuilt projection equals the lived one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.batch.manifest import Manifest
from headrace.trajectory import Provenance, StopReason
from headrace.wire.codec import TrajectoryHead
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.scheduler.events import AnyEvent, BatchAcked, BatchDissolved, EpisodeEnded

FILTER_COLUMNS = ("status", "environment", "evaluation")
"""Columns that a listing can be narrowed by."""


class TrajectoryEntry(NamedTuple):
    """A stored trajectory: its outcome, and what that does not say of the record."""

    outcome: EpisodeEnded
    stop_reason: StopReason
    provenance: Provenance
    assets: Sequence[str]


class BatchEntry(NamedTuple):
    """A frozen batch, and the groups in it."""

    batch: str
    run: str
    version: str
    groups: tuple[str, ...]


class FileDeleted(NamedTuple):
    """A file of the log was deleted."""

    number: int


Entry = TrajectoryEntry | BatchEntry | BatchAcked | BatchDissolved | FileDeleted
"""What has rows in the projection."""


class LocatedEntry(NamedTuple):
    """Something to be listed, and where its frame is."""

    listed: Entry
    location: Location


class StoredTrajectory(NamedTuple):
    """Where a trajectory is, and whose it is."""

    id: str
    run: str
    group: str
    episode: str
    attempt: int
    worker: str
    """Who wrote it; empty for the scheduler itself."""
    location: Location


def entries_of(events: Sequence[AnyEvent], source: TrajectoryHead | Manifest | None) -> Iterator[Entry]:
    """What is to be listed of a frame that was read: its events, and the head or the manifest that one is read from."""
    if isinstance(source, Manifest):
        groups = tuple(group.id for group in source.groups)
        yield BatchEntry(source.batch, source.run, str(source.version), groups)
        return
    for event in events:
        if isinstance(event, EpisodeEnded) and isinstance(source, TrajectoryHead):
            names = tuple(asset.name for asset in source.assets)
            yield TrajectoryEntry(event, source.stop_reason, source.provenance, names)
        elif isinstance(event, (BatchAcked, BatchDissolved)):
            yield event

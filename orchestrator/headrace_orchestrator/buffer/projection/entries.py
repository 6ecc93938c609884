"""Entries of the projection: the data that it stores for a frame, and that it returns for a trajectory.

* A frame's entries follow from the frame alone, so a rebuilt projection equals the original one.
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


class ProjectedTrajectory(NamedTuple):
    """A stored trajectory: its event, and the listed fields of the record that the event lacks."""

    event: EpisodeEnded
    stop_reason: StopReason
    provenance: Provenance
    assets: Sequence[str]


class ProjectedBatch(NamedTuple):
    """A frozen batch, and the groups in it."""

    batch: str
    run: str
    version: str
    groups: tuple[str, ...]


class FileDeleted(NamedTuple):
    """A file of the log was deleted."""

    number: int


ProjectionEntry = ProjectedTrajectory | ProjectedBatch | BatchAcked | BatchDissolved | FileDeleted
"""Anything that changes rows of the projection."""


class LocatedEntry(NamedTuple):
    """An entry, and the location of its frame."""

    entry: ProjectionEntry
    location: Location


class StoredTrajectory(NamedTuple):
    """Identity and location of a stored trajectory."""

    id: str
    run: str
    group: str
    episode: str
    attempt: int
    worker: str
    """The worker that wrote it; empty for the scheduler."""
    location: Location


def entries_of(events: Sequence[AnyEvent], source: TrajectoryHead | Manifest | None) -> Iterator[ProjectionEntry]:
    """The entries of a frame that was read. ``source``: the head or the manifest that is its payload."""
    if isinstance(source, Manifest):
        groups = tuple(group.id for group in source.groups)
        yield ProjectedBatch(source.batch, source.run, str(source.version), groups)
        return
    for event in events:
        if isinstance(event, EpisodeEnded) and isinstance(source, TrajectoryHead):
            names = tuple(asset.name for asset in source.assets)
            yield ProjectedTrajectory(event, source.stop_reason, source.provenance, names)
        elif isinstance(event, (BatchAcked, BatchDissolved)):
            yield event

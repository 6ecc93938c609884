"""What the projection is told of a frame.

* A frame's rows follow from the frame alone: a rebuilt projection equals the lived one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.codec import TrajectoryHead
from headrace.manifest import Manifest
from headrace.trajectory import Provenance, StopReason
from headrace_orchestrator.buffer.log import Location
from headrace_orchestrator.buffer.projection import (
    Statement,
    asset_reference,
    batch_row,
    batch_settled,
    file_gone,
    member_row,
    trajectory_row,
)
from headrace_orchestrator.scheduler.records import AnyRecord, BatchAcked, BatchDissolved, EpisodeEnded


class TrajectoryListed(NamedTuple):
    """A stored trajectory: its outcome, and what that does not say of the record."""

    outcome: EpisodeEnded
    stop_reason: StopReason
    provenance: Provenance
    assets: Sequence[str]


class BatchListed(NamedTuple):
    """A frozen batch, and the groups in it."""

    batch: str
    run: str
    version: str
    groups: tuple[str, ...]


class FileGone(NamedTuple):
    """A file of the log was deleted."""

    number: int


Listed = TrajectoryListed | BatchListed | BatchAcked | BatchDissolved | FileGone
"""What has rows in the projection."""


class Unprojected(NamedTuple):
    """Something to be listed, and where its frame is."""

    listed: Listed
    location: Location


def listed_of(facts: Sequence[AnyRecord], source: TrajectoryHead | Manifest | None) -> Iterator[Listed]:
    """What is to be listed of a frame that was read: its facts, and the head or the manifest that one is read from."""
    if isinstance(source, Manifest):
        groups = tuple(group.id for group in source.groups)
        yield BatchListed(source.batch, source.run, str(source.version), groups)
        return
    for fact in facts:
        if isinstance(fact, EpisodeEnded) and isinstance(source, TrajectoryHead):
            names = tuple(asset.name for asset in source.assets)
            yield TrajectoryListed(fact, source.stop_reason, source.provenance, names)
        elif isinstance(fact, (BatchAcked, BatchDissolved)):
            yield fact


def rows(waiting: Iterable[Unprojected]) -> Iterator[Statement]:
    """The changes to the projection, in order."""
    for listed, location in waiting:
        match listed:
            case TrajectoryListed(outcome, stop_reason, provenance, assets):
                yield trajectory_row(outcome, stop_reason, provenance, location)
                yield from (asset_reference(name, location.file) for name in assets)
            case BatchListed(batch, run, version, groups):
                yield batch_row(batch, run, version, location)
                yield from (member_row(run, group, location) for group in groups)
            case BatchAcked():
                made = str(listed.version) if listed.version is not None else ""
                yield batch_settled(listed.batch, "acked", made)
            case BatchDissolved():
                yield batch_settled(listed.batch, "dissolved")
            case FileGone(number):
                yield from file_gone(number)

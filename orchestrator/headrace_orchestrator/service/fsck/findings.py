"""What a check of a data directory finds, and what it costs."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.store.log_format import FrameType

FindingKind = Literal["record", "copy", "head", "footer", "file", "projection", "asset"]


class FsckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of damage. ``names``: ids of the trajectories or batches that it is about, as far as they are known.
    ``lost``: something is gone that nothing gives back; otherwise the rest of the directory makes up for it."""

    kind: FindingKind
    lost: bool
    file: str
    offset: int = 0
    size_bytes: int = 0
    type: str = ""
    names: list[str] = []
    problem: str
    cost: str


class FsckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``unfinished_bytes``: an append at the end that was under way or was cut off, so that nobody was
    told that it is stored. ``unprojected_bytes``: what the projection is still behind, as it may be."""

    live: bool
    files: int
    size_bytes: int
    frames: dict[str, int]
    assets: int
    unfinished_bytes: int
    unprojected_bytes: int
    findings: list[FsckFinding]


COST_OF: dict[FrameType | None, str] = {
    FrameType.TRAJECTORY: "This trajectory is lost; a batch that holds it cannot be served any more.",
    FrameType.BATCH: "This batch cannot be served any more; its trajectories are intact.",
    FrameType.CONTROL: "The decisions that were stored here are lost, 64 at most.",
}

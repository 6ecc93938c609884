"""Findings of a check of a data directory, and their cost."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.store.log_format import FrameType

FindingKind = Literal["record", "copy", "head", "footer", "file", "projection", "asset"]


class FsckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of damage. ``names``: ids of the affected trajectories or batches, as far as they are known. ``lost``:
    the data cannot be restored; otherwise the rest of the directory compensates for the damage."""

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
    """The result of a check. ``unfinished_bytes``: size of an append at the end that was under way or cut off, so
    never acknowledged. ``unprojected_bytes``: bytes of the log that the projection does not have yet, not damage."""

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
    FrameType.CONTROL: "The decisions stored here, 64 at most, are lost.",
}

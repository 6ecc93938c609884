"""Checks of a batch against its manifest.

* A body is refused if a column is missing, has the wrong length, or points outside the batch.
* A body is refused if its counts or sizes disagree with its manifest.
* A shard is refused if the shards do not merge to the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.batch.body import PER_ROW, PER_TURN, Columns
from headrace.batch.manifest import BatchCounts, Manifest, Shard, ShardPart
from headrace.batch.shards import find_disagreement
from headrace.errors import InvalidRequest
from headrace.estimators import NONE
from headrace.wire.codec import record_sizes

Part = BatchCounts | ShardPart
"""Counts of the columns that a body holds."""

MOMENT_TOLERANCE = 1e-12
"""Relative tolerance of moments: two machines may add in another order. A larger difference is another batch."""
ADVANTAGE_TOLERANCE = 1e-9
"""Relative tolerance of advantages (1e-12 absolute), as in the definitions of the estimators: whitening enlarges
rounding errors if the spread is small."""


def check_columns(manifest: Manifest, shard: Shard | None, columns: Columns, records: memoryview) -> None:
    """Check all that can be checked without decoding a record. Raises InvalidRequest."""
    for problem in _problems(manifest, shard, columns, records):
        raise disagreement(manifest, problem)


def disagreement(manifest: Manifest, problem: str) -> InvalidRequest:
    """The error for a batch that disagrees with its manifest."""
    return InvalidRequest(
        f"Batch {manifest.batch} disagrees with its manifest: {problem}.",
        hint="None of it can be trusted; give it back and pull again.",
        batch=manifest.batch,
    )


def differences(ours: Any, theirs: Any, path: str = "manifest") -> list[tuple[str, Any, Any]]:
    """The paths at which two trees of builtins differ, with both values; floats differ beyond rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [difference for key in ours for difference in differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [difference for k, (one, other) in pairs for difference in differences(one, other, f"{path}[{k}]")]
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return [] if agree(np.array([theirs]), np.array([ours]), MOMENT_TOLERANCE) else [(path, ours, theirs)]
    return [] if ours == theirs else [(path, ours, theirs)]


def agree(received: npt.NDArray[Any], computed: npt.NDArray[Any], tolerance: float) -> bool:
    """True if two arrays of any shape have equal shapes and integers, and floats within the relative tolerance."""
    if received.shape != computed.shape:
        return False
    if computed.dtype.kind != "f":
        return bool(np.array_equal(received, computed))
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(received - computed) <= 1e-12 + tolerance * np.abs(computed)))


def _problems(manifest: Manifest, shard: Shard | None, columns: Columns, records: memoryview) -> Iterator[str]:
    """Problems in the order in which the columns may be read: the first one is to be raised."""
    if shard is not None and shard.number >= len(shard.parts):
        yield f"it states that it is shard {shard.number} of {len(shard.parts)}"
    part = manifest.counts if shard is None else shard.part
    yield from _length_problems(manifest, shard, part, columns)
    yield from _range_problems(manifest, shard, part, columns, len(records))
    yield from _count_problems(manifest, part, columns)
    yield from _record_problems(columns, records)
    if shard is not None:
        with np.errstate(all="ignore"):  # a damaged number may overflow; then it differs, and is refused
            problem = find_disagreement(manifest, shard, columns)
        if problem:
            yield problem


def _length_problems(manifest: Manifest, shard: Shard | None, part: Part, columns: Columns) -> Iterator[str]:
    per_turn = [name for name in PER_TURN if name != "advantages" or manifest.estimator.name != NONE]
    lengths = {
        **dict.fromkeys(per_turn, part.turns),
        **dict.fromkeys(PER_ROW, part.rows),
        "row_turn_offsets": part.rows + 1,
        "record_offsets": part.trajectories + 1,
        **({} if shard is None else {"row_number": part.rows, "record_number": part.trajectories}),
    }
    for name, length in lengths.items():
        if name not in columns or len(columns[name]) != length:
            yield f"column {name!r} is missing or does not have {length} entries"


def _range_problems(
    manifest: Manifest, shard: Shard | None, part: Part, columns: Columns, records_bytes: int
) -> Iterator[str]:
    whole = manifest.counts
    for name, end in (("row_turn_offsets", part.turns), ("record_offsets", records_bytes)):
        offsets = columns[name].view(np.int64)
        if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
            yield f"column {name!r} does not rise from 0 to {end}"
    for name, bound in (
        ("row_trajectory", whole.trajectories),
        ("row_group", whole.groups),
        ("row_bin", whole.bins),
        ("row_segment", 1 << 31),
        ("row_number", whole.rows),
        ("record_number", whole.trajectories),
    ):
        # As an unsigned integer a negative number is a large one: one comparison finds both.
        if name in columns and len(columns[name]) and columns[name].view(np.uint64).max() >= bound:
            yield f"column {name!r} points outside [0, {bound})"
    if shard is not None and not np.array_equal(np.unique(columns["row_trajectory"]), columns["record_number"]):
        yield "its records are not those of its rows"


def _count_problems(manifest: Manifest, part: Part, columns: Columns) -> Iterator[str]:
    whole = manifest.counts
    for noun, stated, counted in (
        ("trajectories", whole.trajectories, len(manifest.trajectories)),
        ("groups", whole.groups, len(manifest.groups)),
        ("members of groups", whole.trajectories, sum(group.actual for group in manifest.groups)),
        ("sampled tokens", part.sampled_tokens, int(columns["turn_tokens"].sum())),
        ("tokens", part.tokens, int(columns["row_tokens"].sum())),
    ):
        if stated != counted:
            yield f"it states {stated} {noun}, but has {counted}"
    if manifest.bin_tokens:
        fullest = np.bincount(columns["row_bin"], weights=columns["row_tokens"]).max(initial=0)
        if fullest > manifest.bin_tokens:
            yield f"a bin holds {fullest:.0f} tokens, more than {manifest.bin_tokens}"


def _record_problems(columns: Columns, records: memoryview) -> Iterator[str]:
    offsets = columns["record_offsets"]
    sizes, stated_sizes = record_sizes(records, offsets[:-1]), offsets[1:] - offsets[:-1]
    if (sizes != stated_sizes).any():
        position = np.flatnonzero(sizes != stated_sizes)[0]
        actual = f"has {sizes[position]} bytes" if sizes[position] >= 0 else "is not a record"
        yield f"record {position} {actual}, instead of {stated_sizes[position]} bytes"
